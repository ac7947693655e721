# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""What a reader thought of what is said: cause, place and remedy, or what of them is missing."""

import re

ALL = "good"

#: A pattern of the name of the case (or nothing), one of the message, and the reading; the first
#: that fits counts.
READINGS: list[tuple[str, str, str]] = [
    # of every row, of the arguments and of the model's own exceptions
    *(("", pattern, ALL) for pattern in (
        "are outside of its support in [\\d,]+ of", "`y\\[i, 0\\]` or `y\\[i\\].squeeze",
        "the vector of the rows' terms", "Leave out `.to_event", "when other rows of the minibatch",
        "and beyond its ends in [\\d,]+ rows", "is not finite in [\\d,]+ of",
        "was found for another model", "belongs to other data", "hidden by `numpyro.handlers",
        "depends on latent sites", "cannot be its initial|is not finite: give",
        "twice: by plate", "indexes with what are no whole numbers", "Its arguments are ",
        "NumPy meets a traced value", "An assertion without words", "A plate has no rows",
        "one entry for each row, and no more", "of which JAX would keep 32 bits",
        "is a masked array with", "step size schedule gives", "is a function, but not one that",
        "is discrete .* and has no gradient", "has nothing to be sampled", "initial value of site",
        "must be one of NumPyro's functions", "A weight in `numpyro.handlers.scale`",
        "is another one each time", "`init_params.* is a .*: give an array", "loses digits",
        "observe them in the model", "its `obs` is None", "plates of the model need two names",
        "what was tuned is kept", "The model needs the value of an argument",
    )),
    # where the message is good elsewhere, and leads astray here
    ("`block` of the plate", "inside `scan` or `cond`", "poor: there is no `scan`"),
    ("`condition` of", "are not indexed by the plate", "poor: `X[i]` cannot be written"),
    ("one-hot labels, Cat", "are of another length", "poor: indexed they are; wrong law"),
    ("the previous observation", "make the two lengths equal", "poor: right, and refused"),
    ("x\\[i \\* 1\\]|\\[i - 1\\]", "make the two lengths equal", "poor: right, and refused"),
    ("DataFrame in the model|np.log.*inside", "not one of its arguments", ALL),
    ("closure", "not one of its arguments", ALL),
    ("", "not one of its arguments", "poor: it is one, remedy fails"),
    ("`int\\(group|`float\\(y|`if` on.*data|an array", "needs the value of an argument", ALL),
    ("latent value|assert", "needs the value of an argument", "poor: it is no argument"),
    ("`obs=None`|no `obs`|`obs=y`", "is inside the subsampled plate", "poor: `obs` is missing"),
    ("two plates of one name", "had size .* when the sampler", "poor: two plates, one name"),
    ("`substitute`|`replay`", "init_to_uniform\\(\\) skipping", "poor: what of the site?"),
    ("labels|probabilities|count|rates|zero|Poisson|Binomial|Beta|Gamma|order|Uniform|Dirichlet|fraction|beyond",
     "Check that the data lie in the support", "poor: no row, no cause"),
    # of the package
    ("", "entries that are NaN or infinite", ALL),
    ("", "The model cannot be evaluated on a minibatch", ALL),
    ("", "is inside the subsampled plate .*its \\d+ values", ALL),
    ("", "has an `obs_mask`", ALL),
    ("", "depends on the minibatch of plate .* but stands outside", ALL),
    ("", "which has \\d+ rows. Rows beyond the end", ALL),
    ("", "must be a positive finite number; got", ALL),
    ("", "No plate of the model has a `subsample_size`: every step", ALL),
    ("", "is a `numpyro.param`: it stays at its initial value", ALL),
    ("", "needs minibatches, but no plate of the model", ALL),
    ("", "both must be Python integers", ALL),
    ("", "has no latent sites", "good, but no remedy"),
    ("", "has shape .*, but the unconstrained value", ALL),
    ("", "subsample_size=\\d+, which must be from 1 to", ALL),
    ("", "must be a dict of unconstrained values for the latent sites", ALL),
    ("", "must have the same leading dimension as `num_chains`", "good: NumPyro's own"),
    ("", "the arguments are model, step_size", ALL),
    ("", "The state has no field .*it has", ALL),
    # of others
    ("", "num_samples must be a positive integer", "good: NumPyro's own"),
    ("", "does not support observe statements", "good: NumPyro's own"),
    ("", "^ValueError: Incompatible shapes", "poor: no site, no remedy"),
    ("", "There are not enough devices", "good: NumPyro's own"),
    ("", "Only supporting the following methods to draw chains", "good: NumPyro's own"),
    ("", "Can't pickle local object", "good: Python's own, place named"),
    ("", "missing 1 required positional argument: 'u'", "poor: `step_size` not named"),
    ("", "missing 1 required positional argument|unexpected keyword", "good: Python's own"),
    ("schedule", "^Tracer|Only scalar arrays|float\\(\\) argument", "poor: `step_size` not named"),
    ("", "no attribute 'sample_field'|'property' object is", "poor: of NumPyro, no remedy"),
    ("", "'function' object has no attribute 'shape'", "poor: no cause, no remedy"),
    ("integer as key", "vmap was requested", "poor: JAX's; NUTS says the same"),
    ("dtype_promotion", "implicit dtype promotion", "poor: JAX's; NUTS says the same"),
    ("rank_promotion", "could not be broadcast", "poor: fails inside the package"),
    ("as a word", "^AssertionError", "poor: no words; of NumPyro"),
    ("`init_to_value`|as strategy", "^TypeError|matmul input|invalid loc",
     "poor: `init_strategy` not named"),
    ("`init_params`", "^IndexError", "poor: `init_params` not named"),
    ("", "Missing a plate statement for batch dimension", "poor: NumPyro's, no remedy"),
    ("", "^TypeError: Only integer scalar arrays can be converted", "poor: no argument, no remedy"),
    ("jax.jit", "^KeyError", "poor: no cause, no remedy"),
    ("", "needs a model, a function with NumPyro primitives", ALL),
    ("", r"\(\) takes no arguments", "poor: Python's, no remedy"),
    ("", "^KeyError: ", "poor: a list of numbers"),
    ("", "^IndexError: ", "poor: no argument, no remedy"),
    ("", "^AssertionError:\\s*$", "poor: no words"),
    ("", "^AssertionError: size of plate should be positive", "poor: no plate, no remedy"),
    ("", "Error interpreting argument to", "poor: JAX's, no argument named"),
    ("", "masked arrays are not supported", "poor: filling makes 1e20 of missing"),
    ("", "must have integer or boolean type, got indexer", "poor: no argument, no remedy"),
    ("", "indices must be of integer type", "poor: no site, no remedy"),
    ("", "object of type .* has no len", "poor: no argument, no remedy"),
    ("", "'NoneType' object is not subscriptable", "poor: no argument, no remedy"),
    ("", "only operates on DataArrays", "poor: no argument, no remedy"),
    ("", "incompatible shapes for broadcasting", "poor: no site, no remedy"),
    ("", "'scale' argument should be positive", "poor: no site; zeros are meant"),
    ("", "^Tracer\\w+Error: ", "poor: JAX's, no remedy"),
]  # fmt: skip


def reading_of(name: str, verdict: str, said: str) -> tuple[str, str]:
    """The verdict with a refusal told from a traceback, and the reading; `unread` if it is new."""
    found = next(
        (r for case, p, r in READINGS if re.search(case, name) and re.search(p, said, re.DOTALL)),
        "unread",
    )
    if verdict == "raised":
        return ("TRACEBACK" if found.startswith("poor") else "refused"), found
    return verdict, found if "warned" in verdict else ""

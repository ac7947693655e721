# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""Effect handlers around and inside of models."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import AffineTransform
from numpyro.handlers import (
    block,
    condition,
    do,
    infer_config,
    lift,
    mask,
    reparam,
    replay,
    scale,
    scope,
    seed,
    substitute,
    trace,
)  # fmt: skip
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

from .cases import (
    BATCH,
    N,
    X,
    Y,
    case,
    coefficients,
    exact,
    exact_mean,
    mean_of,
    never,
    nuts,
    regression,
    rows,
)  # fmt: skip

HANDLERS = "handler"


@case(HANDLERS, "`block` of a latent site", "given tuned")
def block_latent(run):
    def model(x, y):
        w = coefficients(3)
        b = numpyro.sample("b", dist.Normal(3, 1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w + b, 1), obs=y[i])

    return never(run(block(model, hide=["b"]), X, Y))


@case(HANDLERS, "`block` of the observed site", "given tuned")
def block_observed(run):
    run(block(regression, hide=["y"]), X, Y)
    return "WRONG, SILENT: the prior is sampled"


@case(HANDLERS, "`block` of the plate")
def block_plate(run):
    return run(block(regression, hide=["rows"]), X, Y), exact(X, Y)


@case(HANDLERS, "`seed` around the model")
def seeded(run):
    return run(seed(regression, 0), X, Y), exact(X, Y)


@case(HANDLERS, "`condition` of a latent site")
def conditioned(run):
    def model(x, y):
        w = coefficients(3)
        b = numpyro.sample("b", dist.Normal(0, 1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w + b, 1), obs=y[i])

    return run(condition(model, {"b": jnp.array(0.5)}), X, Y), exact(X, Y - 0.5)


@case(HANDLERS, "`condition` of the observed site on all rows", "given tuned")
def condition_observed(run):
    def model(x):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1))

    return run(condition(model, {"y": jnp.asarray(Y)}), X), exact(X, Y)


@case(HANDLERS, "`condition` of the observed site on a minibatch's worth", "given")
def condition_minibatch(run):
    def model(x):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1))

    run(condition(model, {"y": jnp.asarray(Y[:BATCH])}), X)
    return "WRONG, SILENT: rows of other data are combined"


@case(HANDLERS, "`substitute` of a latent site", "given tuned")
def substituted(run):
    def model(x, y):
        w = coefficients(3)
        b = numpyro.sample("b", dist.Normal(0, 1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w + b, 1), obs=y[i])

    # a site that is substituted stays latent, for NUTS too
    right = exact(np.column_stack([X, np.ones(N)]), Y)
    right = right._replace(mean={"w": right.mean["w"][:3]}, sd={"w": right.sd["w"][:3]})
    return run(substitute(model, {"b": jnp.array(0.5)}), X, Y), right


@case(HANDLERS, "`substitute` of the plate's indices", "given")
def substituted_rows(run):
    return run(substitute(regression, {"rows": jnp.arange(BATCH)}), X, Y), exact(X, Y)


@case(HANDLERS, "`replay` of a trace", "given")
def replayed(run):
    found = trace(seed(regression, 0)).get_trace(jnp.asarray(X), jnp.asarray(Y))
    return run(replay(regression, found), X, Y), exact(X, Y)


@case(HANDLERS, "`mask(mask=False)` around the likelihood", "given tuned")
def masked(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i, mask(mask=False):
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    more = {"step_size": 5e-3} if run.__name__ == "given" else {}
    return run(model, X, Y, **more), exact(0 * X, Y)


@case(HANDLERS, "`mask` of all rows, not indexed")
def mask_not_indexed(run):
    def model(x, y, seen):
        w = coefficients(3)
        with rows(N) as i, mask(mask=seen):
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    seen = np.arange(N) % 2 == 0
    return run(model, X, Y, seen), exact(X[seen], Y[seen])


@case(HANDLERS, "`mask` of the length of a minibatch, not indexed", "given tuned")
def mask_of_minibatch(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i, mask(mask=jnp.arange(BATCH) < 40):
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return never(run(model, X, Y))


@case(HANDLERS, "`scale` around the model", "given tuned")
def scaled(run):
    found = exact(X, Y)
    return run(scale(regression, scale=0.5), X, Y), found._replace(
        sd={"w": np.sqrt(2) * found.sd["w"]}
    )


@case(HANDLERS, "`scale` by weights of all rows, not indexed")
def scale_not_indexed(run):
    def model(x, y, weight):
        w = coefficients(3)
        with rows(N) as i, scale(scale=weight):
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(model, X, Y, np.ones(N)), exact(X, Y)


@case(HANDLERS, "`scale` by weights of which some are negative", "given")
def negative_weights(run):
    def model(x, y, weight):
        w = coefficients(3)
        with rows(N) as i, scale(scale=weight[i]):
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    run(model, X, Y, np.where(np.arange(N) < 300, -1.0, 1.0))
    return "WRONG, SILENT: no density"


@case(HANDLERS, "`scale` by weights of which some are zero", "given tuned")
def zero_weights(run):
    def model(x, y, weight):
        w = coefficients(3)
        with rows(N) as i, scale(scale=weight[i]):
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    weight = (np.arange(N) % 2 * 2.0).astype(np.float32)
    return run(model, X, Y, weight), exact(X, Y, weight)


@case(HANDLERS, "`lift` of a param")
def lifted(run):
    def model(x, y):
        w = numpyro.param("w", jnp.zeros(3))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    prior = {"w": dist.Normal(0, 1).expand([3]).to_event(1)}
    return run(lift(model, prior=prior), X, Y), exact(X, Y)


@case(HANDLERS, "`numpyro.param` for a parameter", "given tuned")
def parameter(run):
    def model(x, y):
        w = numpyro.param("w", jnp.zeros(3))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, sigma), obs=y[i])

    run(model, X, Y)
    return "WRONG, SILENT: the parameter stays where it is"


@case(HANDLERS, "`numpyro.param` with a constraint of a shape", "given")
def constrained_parameter(run):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        one = numpyro.param("one", 1.0, constraint=constraints.positive)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(mu, one), obs=y[i])

    return run(model, Y), exact_mean(Y)


def hierarchy(y, batch=BATCH):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.LogNormal(0, 0.5))
    with numpyro.plate("groups", 8):
        a = numpyro.sample("a", dist.Normal(mu, tau))
    with rows(N, batch) as i:
        numpyro.sample("y", dist.Normal(a[i % 8], 1), obs=y[i])


@case(HANDLERS, "`reparam` with `LocScaleReparam(0)`", "tuned")
def loc_scale(run):
    y = (Y + np.arange(N) % 8).astype(np.float32)
    found = nuts(hierarchy_of_all, y)
    return run(reparam(hierarchy, {"a": LocScaleReparam(0)}), y), found


def hierarchy_of_all(y):
    hierarchy(y, None)


@case(HANDLERS, "`reparam` with a learned `LocScaleReparam()`", "tuned")
def loc_scale_learned(run):
    y = (Y + np.arange(N) % 8).astype(np.float32)
    return run(reparam(hierarchy, {"a": LocScaleReparam()}), y), nuts(hierarchy_of_all, y)


@case(HANDLERS, "`reparam` with `TransformReparam`")
def transformed(run):
    def model(x, y):
        base = dist.Normal(0, 1).expand([3])
        w = numpyro.sample(
            "w", dist.TransformedDistribution(base, AffineTransform(0.0, 1.0)).to_event(1)
        )
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])

    return run(reparam(model, {"w": TransformReparam()}), X, Y), exact(X, Y)


@case(HANDLERS, "`reparam` of the observed site", "given")
def reparam_observed(run):
    return run(reparam(regression, {"y": LocScaleReparam(0)}), X, Y), exact(X, Y)


@case(HANDLERS, "`do` on a latent site", "given tuned")
def intervention(run):
    def model(x, y):
        w = coefficients(3)
        b = numpyro.sample("b", dist.Normal(0, 1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w + b, 1), obs=y[i])

    return run(do(model, {"b": 0.5}), X, Y), exact(X, Y - 0.5)


@case(HANDLERS, "`infer_config` around the model", "given")
def configured(run):
    return run(infer_config(regression, lambda site: {"enumerate": "parallel"}), X, Y), exact(X, Y)


@case(HANDLERS, "`scope` around the model", "given tuned")
def scoped(run):
    return run(scope(regression, "a", divider="/"), X, Y), exact(X, Y, name="a/w")


@case(HANDLERS, "`trace` around the model", "given")
def traced(run):
    return run(trace(regression), X, Y), exact(X, Y)


@case(HANDLERS, "`obs=None` by mistake", "given tuned")
def obs_none(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=None)

    run(model, X, Y)
    return "WRONG, SILENT: sampled without data"


@case(HANDLERS, "`obs_mask`", "given")
def obs_mask(run):
    def model(y, seen):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i], obs_mask=seen[i])

    seen = np.arange(N) % 2 == 0
    return run(model, Y, seen), exact_mean(Y[seen])


@case(HANDLERS, "`plate_stack` with a subsampled plate", "given")
def stack(run):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate_stack("rows", [BATCH]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[:BATCH])

    found = exact_mean(Y[:BATCH])
    return run(model, Y), found


@case(HANDLERS, "a model for `full_data` given again", "given")
def full_data_again(run):
    from numpyro_sgmcmc import full_data

    return run(full_data(mean_of), Y), exact_mean(Y)


@case(HANDLERS, "`numpyro.validation_enabled()` around the run")
def validation(run):
    with numpyro.validation_enabled():
        return run(regression, X, Y), exact(X, Y)


@case(HANDLERS, "`CollapseReparam`-like: `dist.Normal(...).mask(False)`", "given")
def masked_distribution(run):
    def model(x, y):
        w = coefficients(3)
        with rows(N) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 1).mask(jnp.arange(BATCH) >= 0), obs=y[i])

    return run(model, X, Y), exact(X, Y)

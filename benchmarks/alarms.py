# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
How often a verdict is a false alarm, and whether there is one where steps are too long.

    python benchmarks/alarms.py [--only WORD ...] [--keys 100] [--draws 1000]

Skewed posteriors, each tuned once: runs of two chains with keys of their own, and a fifth as many
with steps two and four times as long. An alarm is a verdict other than "No problem found", and
those by R-hat or few effective samples alone, which ask for longer runs, are counted apart. Beside
it is what is wrong in all of these runs together, against NUTS on all rows: the largest error of a
median, in halves of the width, and the largest relative one of a width, from 16 to 84 % (a standard
deviation on each side, of a Gaussian).
"""

import argparse
from collections import Counter
from copy import copy
import re
import sys
import warnings

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import expit
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import CCAdL, full_data, summary

#: Chains of a run.
CHAINS = 2

#: Of the quantiles that are compared: the median, and a standard deviation of a Gaussian away.
LEVELS = (0.1587, 0.5, 0.8413)

#: Verdicts without their numbers, of runs that are right, and of those that are too short.
SILENT = re.compile(r"No problem found")
SLOW = re.compile(
    r"Do not trust this run: the chains have not mixed[^;]*\.( Too short.*)?$|Too short"
)


def hurdle_gamma(x, y, batch=100):
    """Costs: none of many rows, and a gamma law of the others."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    zero = numpyro.sample("zero", dist.Normal(0, 1.5))
    shape = numpyro.sample("shape", dist.Exponential(0.2))
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        some = y[i] > 0
        numpyro.sample("some", dist.Bernoulli(logits=zero), obs=some.astype(float))
        with numpyro.handlers.mask(mask=some):
            mean = jnp.exp(w[0] + w[1] * x[i])
            amount = jnp.where(some, y[i], 1.0)
            numpyro.sample("y", dist.Gamma(shape, shape / mean), obs=amount)


def hurdle_data(rng, rows=1_000):
    x = rng.standard_normal(rows)
    amount = rng.gamma(1.5, np.exp(0.5 + 0.4 * x) / 1.5)
    return x, np.where(rng.random(rows) < 0.06, amount, 0.0)


def gamma_shape(y, batch=20):
    shape = numpyro.sample("shape", dist.ImproperUniform(dist.constraints.positive, (), ()))
    rate = numpyro.sample("rate", dist.ImproperUniform(dist.constraints.positive, (), ()))
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.Gamma(shape, rate), obs=y[i])


def gamma_data(rng, rows=100):
    return (rng.gamma(2.0, 1.0, rows),)


def ordinal(level, x, y, batch=100):
    """The steps of an ordered predictor are shares of its effect."""
    effect = numpyro.sample("effect", dist.Normal(0, 1))
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(4)))
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.handlers.reparam(config={"cuts": _ordered()}):
        cuts = numpyro.sample("cuts", _cuts(3))
    reached = jnp.concatenate([jnp.zeros(1), jnp.cumsum(share)])
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        location = w * x[i] + effect * reached[level[i]]
        numpyro.sample("y", dist.OrderedLogistic(location, cuts), obs=y[i])


def _cuts(count):
    base = dist.Normal(0, 2).expand([count]).to_event(1)
    return dist.TransformedDistribution(base, dist.transforms.OrderedTransform())


def _ordered():
    return numpyro.infer.reparam.TransformReparam()


def ordinal_data(rng, rows=1_000):
    level, x = rng.integers(0, 5, rows), rng.standard_normal(rows)
    reached = np.array([0, 0.4, 0.6, 0.8, 1])
    latent = 0.5 * x + 1.5 * reached[level] + rng.logistic(size=rows)
    return level, x, np.digitize(latent, [-0.5, 0.8, 2.0])


def beta_binomial(x, y, batch=100):
    w = numpyro.sample("w", dist.Normal(0, 1.5).expand([2]).to_event(1))
    size = numpyro.sample("size", dist.HalfCauchy(5))
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        mean = jax.nn.sigmoid(w[0] + w[1] * x[i])
        numpyro.sample("y", dist.BetaBinomial(mean * size, (1 - mean) * size, 10), obs=y[i])


def beta_binomial_data(rng, rows=200):
    x = rng.standard_normal(rows)
    mean = expit(0.3 + 0.5 * x)
    return x, rng.binomial(10, rng.beta(15 * mean, 15 * (1 - mean)))


def negative_binomial(x, y, batch=100):
    w = numpyro.sample("w", dist.Normal(0, 1.5).expand([2]).to_event(1))
    concentration = numpyro.sample("concentration", dist.HalfCauchy(5))
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        mean = jnp.exp(w[0] + w[1] * x[i])
        numpyro.sample("y", dist.NegativeBinomial2(mean, concentration), obs=y[i])


def negative_binomial_data(rng, rows=300):
    x = rng.standard_normal(rows)
    mean = np.exp(0.2 + 0.4 * x)
    return x, rng.poisson(mean * rng.gamma(3.0, 1 / 3.0, rows))


def slopes(group, x, y, groups=12, batch=100):
    """Intercepts and slopes of groups, correlated."""
    mean = numpyro.sample("mean", dist.Normal(0, 2).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
    corr = numpyro.sample("corr", dist.LKJCholesky(2, 2.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("groups", groups):
        # and not `mean + z @ factor.T` by hand, which the tuning does not see through and doubts
        law = dist.MultivariateNormal(mean, scale_tril=scale[:, None] * corr)
        effects = numpyro.sample("effects", law)
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        found = effects[group[i]]
        numpyro.sample("y", dist.Normal(found[:, 0] + found[:, 1] * x[i], sigma), obs=y[i])


def slopes_data(rng, rows=1_000, groups=12):
    group, x = rng.integers(0, groups, rows), rng.standard_normal(rows)
    effects = rng.multivariate_normal([1, 0.5], [[0.5, 0.2], [0.2, 0.3]], groups)
    return group, x, effects[group, 0] + effects[group, 1] * x + rng.standard_normal(rows)


MODELS = {
    "hurdle gamma": (hurdle_gamma, hurdle_data),
    "shape of a gamma law, flat prior": (gamma_shape, gamma_data),
    "ordinal, monotonic effect": (ordinal, ordinal_data),
    "beta-binomial": (beta_binomial, beta_binomial_data),
    "negative binomial": (negative_binomial, negative_binomial_data),
    "LKJ slopes": (slopes, slopes_data),
}


def arrays(values):
    return tuple(
        jnp.asarray(x, jnp.int32 if np.issubdtype(x.dtype, np.integer) else jnp.float32)
        for x in map(np.asarray, values)
    )


def right_quantiles(model, args):
    mcmc = MCMC(
        NUTS(full_data(model), target_accept_prob=0.95), num_warmup=1_000, num_samples=5_000,
        num_chains=2, chain_method="sequential", progress_bar=False,
    )  # fmt: skip
    mcmc.run(random.key(0), *args)
    return quantiles_of(mcmc.get_samples())


def quantiles_of(draws):
    return {
        name: np.quantile(np.asarray(x, np.float64).reshape(len(x), -1), LEVELS, axis=0)
        for name, x in draws.items()
    }


def errors(draws, right):
    """The largest error of a median, in halves of the width, and of a width, relative."""
    medians = widths = 0.0
    for name, (low, middle, high) in quantiles_of(draws).items():
        low0, middle0, high0 = right[name]
        width = np.where(high0 - low0 > 1e-6, high0 - low0, np.inf)
        of_medians, of_widths = np.abs(middle - middle0) / (width / 2), (high - low) / width - 1
        # draws that are not finite are as wrong as can be
        medians = max(medians, float(np.max(np.nan_to_num(of_medians, nan=np.inf))))
        moves = np.isfinite(width)
        of_widths = np.nan_to_num(np.abs(of_widths[moves]), nan=np.inf)
        widths = max(widths, float(np.max(of_widths)))
    return medians, widths


def part_of(mcmc, chains):
    """A run of some of the chains, which have keys of their own."""
    part, state = copy(mcmc), mcmc.last_state
    part._states = jax.tree.map(lambda x: x[chains], dict(mcmc._states))
    part._states_flat, part.num_chains = None, CHAINS
    own = jax.tree.map(lambda x: x[chains], state._replace(fixed=None))
    part._last_state = own._replace(fixed=state.fixed)
    return part


def verdict_of(run):
    """Without its numbers."""
    try:
        verdict = summary(run).verdict
    except ValueError as error:  # draws that are not finite
        verdict = str(error)
    return re.sub(r"[-+]?\d[\d.,e+-]*%?", "#", verdict.partition(" Not known")[0])


def looked_at(kernel, args, keys, draws):
    """Of many runs at once: the verdicts, the share of undone steps, and all draws."""
    mcmc = MCMC(
        kernel, num_warmup=200, num_samples=draws, num_chains=CHAINS * keys,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.run(random.key(1), *args)
    parts = [part_of(mcmc, slice(CHAINS * k, CHAINS * (k + 1))) for k in range(keys)]
    undone = float(mcmc.last_state.monitor.nonfinite_steps.mean() / mcmc.last_state.i[0])
    said = Counter(verdict_of(part) for part in parts)
    for words, count in said.most_common():
        print(f"    {count} {words}", file=sys.stderr, flush=True)
    return said, undone, mcmc.get_samples()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of models")
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--draws", type=int, default=1_000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| posterior | steps | alarms | R-hat alone | undone | median off | width off |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, (model, data) in MODELS.items():
        if options.only and not any(word in name for word in options.only):
            continue
        args = arrays(data(np.random.default_rng(0)))
        right = right_quantiles(model, args)
        tuning = CCAdL(model, progress_bar=False).tune(random.key(0), *args)
        print(f"{name}: {tuning}", file=sys.stderr, flush=True)
        for longer in (1, 2, 4):
            step_size = longer * tuning.step_size
            keys = options.keys if longer == 1 else max(options.keys // 5, 5)
            kernel = CCAdL(model, step_size=step_size, tuning=tuning,
                           steps_per_sample=tuning.steps_per_sample)  # fmt: skip
            said, undone, draws = looked_at(kernel, args, keys, options.draws)
            alarms = said.total() - sum(said[words] for words in said if SILENT.match(words))
            slow = sum(said[words] for words in said if SLOW.match(words))
            median, width = (f"{x:.3f}" if x < 1 else "1 or more" for x in errors(draws, right))
            print(
                f"| {name} | {longer} x {tuning.step_size:.2f} | {alarms - slow} of {keys}"
                f" | {slow} | {undone:.1e} | {median} | {width} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

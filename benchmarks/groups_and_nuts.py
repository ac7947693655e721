# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Latent variables of groups, integrated out, and NUTS on all of them together: the same models with
the same data, and whether the global parameters and some of the groups have the same law.

    python benchmarks/groups_and_nuts.py --data FOLDER [intercepts] [counts] [mixture]
        [verbagg] [chem97]
"""

import argparse
from pathlib import Path
import sys
import time
import warnings

import jax
from jax import random
import jax.numpy as jnp
from measure import table
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import CCAdL, group_rows, local_draws

#: Groups whose effects are compared, and draws of each chain for that.
GROUPS, LOCAL_DRAWS = 100, 500


def intercepts(y, batch):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    with numpyro.plate("groups", len(y), subsample_size=batch) as g:
        a = numpyro.sample("a", dist.Normal(mu, tau))
        with numpyro.plate("members", y.shape[1]):
            numpyro.sample("y", dist.Bernoulli(logits=a), obs=y[g].T)


def counts(x, y, batch):
    """Counts whose rate has a factor of the group."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    shape = numpyro.sample("shape", dist.LogNormal(0, 1))
    with numpyro.plate("groups", len(y), subsample_size=batch) as g:
        rate = numpyro.sample("rate", dist.Gamma(shape, shape))
        with numpyro.plate("members", y.shape[1]):
            mean = rate * jnp.exp(b[0] + b[1] * x[g].T)
            numpyro.sample("y", dist.Poisson(mean), obs=y[g].T)


def mixture(y, batch):
    """The class of each row."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    low = numpyro.sample("low", dist.Normal(0, 5))
    gap = numpyro.sample("gap", dist.HalfNormal(5))
    sd = numpyro.sample("sd", dist.HalfNormal(2).expand([2]).to_event(1))
    centers = low + jnp.stack([jnp.zeros_like(gap), gap])
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        k = numpyro.sample("k", dist.Categorical(weights), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(centers[k], sd[k]), obs=y[i])


def without_classes(y, batch):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    low = numpyro.sample("low", dist.Normal(0, 5))
    gap = numpyro.sample("gap", dist.HalfNormal(5))
    sd = numpyro.sample("sd", dist.HalfNormal(2).expand([2]).to_event(1))
    centers = low + jnp.stack([jnp.zeros_like(gap), gap])
    with numpyro.plate("rows", len(y)):
        both = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(centers, sd))
        numpyro.sample("y", both, obs=y)


def verbagg(y, batch):
    """Persons and items: two parameters of each item, the ability of a person."""
    easy = numpyro.sample("easy", dist.Normal(0, 2).expand([y.shape[1]]).to_event(1))
    slope = numpyro.sample("slope", dist.LogNormal(0, 0.5).expand([y.shape[1]]).to_event(1))
    with numpyro.plate("persons", len(y), subsample_size=batch) as g:
        ability = numpyro.sample("ability", dist.Normal(0, 1))
        logits = slope * ability[:, None] + easy
        numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y[g])


def of_authorities(x):
    """What pupils in schools in authorities have in common."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    b = numpyro.sample("b", dist.Normal(0, 5).expand([x.shape[1]]).to_event(1))
    between = numpyro.sample("between", dist.HalfNormal(2))
    within = numpyro.sample("within", dist.HalfNormal(2))
    sd = numpyro.sample("sd", dist.HalfNormal(5))
    lea = numpyro.sample("lea", dist.Normal(0, between).expand([131]).to_event(1))
    return mu, b, within, sd, lea


def chem97(score, x, authority, members, observed, batch):
    """Pupils in schools in authorities: a school is latent, an authority a parameter."""
    mu, b, within, sd, lea = of_authorities(x)
    with numpyro.plate("schools", len(members), subsample_size=batch) as g:
        a = numpyro.sample("a", dist.Normal(lea[authority[g]], within))
        with numpyro.plate("pupils", members.shape[1]):
            row = members[g].T
            likelihood = dist.Normal(mu + a + x[row] @ b, sd)
            numpyro.sample("score", likelihood.mask(observed[g].T), obs=score[row])


def chem97_by_row(score, x, authority, school):
    """The same, each pupil once and not in a padded table."""
    mu, b, within, sd, lea = of_authorities(x)
    with numpyro.plate("schools", len(authority)):
        a = numpyro.sample("a", dist.Normal(lea[authority], within))
    with numpyro.plate("pupils", len(score)):
        numpyro.sample("score", dist.Normal(mu + a[school] + x @ b, sd), obs=score)


def insteval(rating, lecturer, members, observed, batch):
    """Students and the lecturers whom they rate: a student is latent, a lecturer a parameter."""
    mu = numpyro.sample("mu", dist.Normal(3, 2))
    of_lecturers = numpyro.sample("of_lecturers", dist.HalfNormal(1))
    of_students = numpyro.sample("of_students", dist.HalfNormal(1))
    sd = numpyro.sample("sd", dist.HalfNormal(2))
    b = numpyro.sample("b", dist.Normal(0, of_lecturers).expand([1_128]).to_event(1))
    with numpyro.plate("students", len(members), subsample_size=batch) as g:
        a = numpyro.sample("a", dist.Normal(0, of_students))
        with numpyro.plate("ratings", members.shape[1]):
            row = members[g].T
            likelihood = dist.Normal(mu + a + b[lecturer[row]], sd)
            numpyro.sample("rating", likelihood.mask(observed[g].T), obs=rating[row])


def simulated(name, rng):
    """Model for us, model for NUTS, data, size of the minibatches."""
    if name == "intercepts":
        a = 0.5 + 1.5 * rng.standard_normal((2_000, 1))
        y = rng.random((2_000, 4)) < 1 / (1 + np.exp(-a))
        return intercepts, intercepts, (y.astype(np.float32),), 200
    if name == "counts":
        x = rng.standard_normal((2_000, 4)).astype(np.float32)
        y = rng.poisson(rng.gamma(2.0, 0.5, (2_000, 1)) * np.exp(0.5 + 0.3 * x))
        return counts, counts, (x, y.astype(np.float32)), 200
    is_low = rng.random(5_000) < 0.3
    y = np.where(is_low, -1 + rng.standard_normal(5_000), 2 + 1.5 * rng.standard_normal(5_000))
    return mixture, without_classes, (y.astype(np.float32),), 200


def real(name, folder):
    """Likewise; and the data for NUTS where they are others."""
    with np.load(Path(folder) / f"{name}.npz", allow_pickle=False) as file:
        data = {key: file[key] for key in file.files if key != "meta"}
    if name == "verbagg":
        person, item = (data[key].astype(int) for key in ("person", "item"))
        y = np.zeros((person.max() + 1, item.max() + 1), np.float32)
        y[person, item] = data["yes"]
        return verbagg, verbagg, (y,), 50
    if name == "chem97":
        school = data["school"].astype(int)
        members, observed = group_rows(school)
        authority = data["lea"].astype(int)[members[:, 0]]
        x = np.stack([data[k].astype(np.float32) for k in ("gcse", "male", "age")], axis=1)
        x = (x - x.mean(0)) / x.std(0)
        score = data["score"].astype(np.float32)
        by_row = (score, x, authority, school)
        return chem97, chem97_by_row, (score, x, authority, members, observed), 200, by_row
    student, lecturer = (data[key].astype(int) for key in ("student", "lecturer"))
    members, observed = group_rows(student)
    rating = data["rating"].astype(np.float32)
    by_row = (rating, lecturer, student)
    return insteval, None, (rating, lecturer, members, observed), 200, by_row


def run(kernel, data, warmup, samples, key):
    """Draws by chain, the run, and its seconds."""
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = time.perf_counter()
    mcmc.run(key, *data)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    return draws, mcmc, time.perf_counter() - start


def moments(draws):
    """Of each number: mean, standard deviation, their errors, and the least effective size."""
    flat = np.asarray(draws, np.float64).reshape(*draws.shape[:2], -1)
    mean, sd = flat.mean((0, 1)), flat.std((0, 1))
    size = np.asarray(effective_sample_size(flat)).reshape(-1)
    spread = np.abs(flat - mean) ** 2
    error = np.sqrt(np.maximum(spread.var((0, 1)), 1e-30) / effective_sample_size(spread))
    # some entries of a factor of correlations are always the same
    return mean, sd, sd / np.sqrt(size), error / (2 * np.maximum(sd, 1e-15)), np.nanmin(size)


def compared(ours, theirs):
    """The largest differences in standard errors, of means and of standard deviations."""
    means, sds, shift, ratios = [], [], 0.0, []
    for name in ours:
        a, b = moments(ours[name]), moments(theirs[name])
        varies = b[1] > 1e-6
        means.append(np.abs(a[0] - b[0])[varies] / np.hypot(a[2], b[2])[varies])
        sds.append(np.abs(a[1] - b[1])[varies] / np.hypot(a[3], b[3])[varies])
        shift = max(shift, float(np.max(np.abs(a[0] - b[0])[varies] / b[1][varies])))
        ratios.append(a[1][varies] / b[1][varies])
    means, sds, ratios = (np.concatenate(x) for x in (means, sds, ratios))
    return means, sds, shift, ratios


def ks_of_groups(mcmc, nuts, size):
    """The part of some groups whose draws of both have laws that differ at the level of 1 %."""
    rng = np.random.default_rng(1)
    groups = np.sort(rng.choice(size, min(GROUPS, size), replace=False))
    found = local_draws(mcmc, groups=groups, num_draws=LOCAL_DRAWS, rng_key=random.key(5))
    rejected, tests = 0, 0
    for name, ours in found.items():
        theirs = np.asarray(nuts[name])
        ours = ours.values.reshape(4, ours.shape[1], len(groups), -1)
        theirs = theirs[:, :, groups].reshape(4, theirs.shape[1], len(groups), -1)
        for g in range(len(groups)):
            for k in range(ours.shape[-1]):
                a, b = ours[:, :, g, k], theirs[:, :, g, k]
                n, m = (
                    min(float(effective_sample_size(x.astype(np.float64))), x.size) for x in (a, b)
                )
                points = np.sort(np.concatenate([a.ravel(), b.ravel()]))
                both = [
                    np.searchsorted(np.sort(x.ravel()), points, side="right") / x.size
                    for x in (a, b)
                ]
                distance = np.abs(both[0] - both[1]).max()
                rejected += distance > 1.63 * np.sqrt(1 / n + 1 / m)
                tests += 1
    return f"{rejected} of {tests}"


def line_of(name, folder, seed, draws, samples):
    """A line of the table."""
    rng = np.random.default_rng(seed)
    is_real = name in ("verbagg", "chem97")
    model, joint, data, batch, *by_row = real(name, folder) if is_real else simulated(name, rng)
    data = tuple(jnp.asarray(x) for x in data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = CCAdL(model, progress_bar=False)
        ours, mcmc, seconds = run(kernel, (*data, batch), 200, draws, random.key(seed))
    number = kernel.tuning.integrals
    # the table of the groups comes last
    size = len([x for x in data if x.ndim == 2][-1]) if name != "mixture" else len(data[0])
    for warning in caught:
        print(f"{name}: {warning.message}", file=sys.stderr, flush=True)
    # where tables are padded NUTS has each row once
    rest = tuple(jnp.asarray(x) for x in by_row[0]) if by_row else (*data, size)
    theirs, _, theirs_seconds = run(NUTS(joint), rest, 500, samples, random.key(seed + 1))
    ours = {k: ours[k] for k in ours if k in theirs}
    means, sds, shift, ratios = compared(ours, theirs)
    locals_ = "-" if name == "mixture" else ks_of_groups(mcmc, theirs, size)
    sizes = [min(moments(x)[4] for x in d.values()) for d in (ours, {k: theirs[k] for k in ours})]
    return (
        name, f"{size:,}", f"{len(means)}", f"{means.max():.1f}", f"{shift:.2f}",
        f"{sds.max():.1f}", f"{ratios.min():.2f} to {ratios.max():.2f}", locals_, f"{number:.1g}",
        f"{sizes[0]:,.0f} in {seconds:.0f} s", f"{sizes[1]:,.0f} in {theirs_seconds:.0f} s",
        str(len(caught)),
    )  # fmt: skip


HEADER = [
    "posterior", "groups", "parameters", "means, se", "sd", "sds, se", "ratios of sds",
    "groups that differ", "integrals off, sd", "least ESS", "of NUTS", "warnings",
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    names = ["intercepts", "counts", "mixture", "verbagg", "chem97"]
    parser.add_argument("names", nargs="*", default=names)
    parser.add_argument("--data", help="folder of the real data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=2_000, help="of each chain of CCAdL")
    parser.add_argument("--samples", type=int, default=1_000, help="of each chain of NUTS")
    options = parser.parse_args()
    lines = []
    for name in options.names:
        lines.append(line_of(name, options.data, options.seed, options.draws, options.samples))
        print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    print(table(HEADER, lines))


if __name__ == "__main__":
    main()

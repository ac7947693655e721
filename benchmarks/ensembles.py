# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Networks where full batches cannot go, against deep ensembles of the same number of passes.

    python benchmarks/ensembles.py --data FOLDER --only flights [--select]

Four members each, and the same passes over the training rows in all: the ensemble spends them on
the descent, a sampler nine tenths of them on the descent and a tenth on warm-up and draws, in the
long cases three quarters and a quarter. Each chain has a diagonal metric of its own. Priors are
normal with standard deviation 3/sqrt(fan in) for weights and 1 for biases; tanh; temperature 1,
unless `CHOSEN` says otherwise. Test rows are a random fifth, of ``mnist`` the official ones.
``--select`` compares two scales of the prior, and goes up and down with each method until both
neighbours are worse, on a tenth of the training rows with a key that is none of the table's. The
scores of test rows: negative log density of the mixture of all draws; error rate, for ``flights``
root mean square error; expected calibration error in 15 bins, for ``flights`` the mean difference
between nominal and empirical coverage of central intervals.
"""

import argparse
import json
from pathlib import Path
import sys
import time
from typing import NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import matplotlib.pyplot as plt
from measure import table
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, init_to_sample

from numpyro_sgmcmc import SGHMC, SGMCLMC, CCAdL, Ensemble, cyclical

MEMBERS, WARMUP, DRAWS, SELECTION_KEY = 4, 5, 20, 100
#: Widths of the layers after the first, rows of a minibatch, and passes in all.
CASES = {
    "flights": ((64, 64, 2), 250, 6),
    "flights-long": ((64, 64, 2), 250, 40),
    "flights-longest": ((64, 64, 2), 250, 160),
    "covtype": ((64, 64, 7), 250, 6),
    "mnist": ((200, 10), 200, 4),
}


class Settings(NamedTuple):
    """
    - **size** - the step size, in cycles the smallest.
    - **share** - the part of the passes that is not for the descent.
    - **temperature** - of the sampler.
    """

    size: float
    share: float = 0.1
    temperature: float = 1.0


#: Prior standard deviations of weights, times the root of the number of inputs, to choose from.
SCALES = (1.0, 3.0)
#: Where the search for the learning rate of the ensemble begins, and for the step sizes of the
#: samplers, of the cycles for the smallest: up and down in `LADDER` until both sides are worse.
BEGIN = {"ensemble": 3e-2, "SGHMC": 3e-3, "CCAdL": 3e-3, "SGMCLMC": 3e-2, "SGHMC in cycles": 3e-3}
LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
#: What ``--select`` found on flights. Elsewhere the step sizes are those, and the learning rates
#: are the best of 0.01, 0.03 and 0.1 on covtype, and of 0.003 and 0.01 on mnist; of the longest
#: flights the temperature is the best of 0.1, 0.3 and 1, at three times the step size.
STEPS = {
    "SGHMC": Settings(0.003),
    "CCAdL": Settings(0.01),
    "SGMCLMC": Settings(0.01),
    "SGHMC in cycles": Settings(0.003),
}
CHOSEN: dict[str, dict] = {
    "flights": {"scale": 3.0, "ensemble": 0.03, **STEPS},
    "flights-long": {"scale": 3.0, "ensemble": 0.03, "SGMCLMC": Settings(0.01, 0.25)},
    "flights-longest": {"scale": 3.0, "ensemble": 0.03, "SGHMC": Settings(0.01, 0.25, 0.3)},
    "covtype": {"scale": 3.0, "ensemble": 0.03, **STEPS},
    "mnist": {"scale": 3.0, "ensemble": 0.01, **STEPS},
}


def out(draw, signal):
    last = len(draw) // 2 - 1
    for k in range(last):
        signal = jnp.tanh(signal @ draw[f"w{k}"] + draw[f"b{k}"])
    return signal @ draw[f"w{last}"] + draw[f"b{last}"]


def law(found, name):
    if name != "flights":
        return dist.Categorical(logits=found)
    return dist.StudentT(4.0, found[..., 0], jax.nn.softplus(found[..., 1]) + 1e-3)


def network(name, scale, x, y):
    widths, rows, _ = CASES[name]
    draw, sizes = {}, [x.shape[1], *widths]
    for k, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        weights = dist.Normal(0, scale * a**-0.5).expand([a, b]).to_event(2)
        draw[f"w{k}"] = numpyro.sample(f"w{k}", weights)
        draw[f"b{k}"] = numpyro.sample(f"b{k}", dist.Normal(0, 1).expand([b]).to_event(1))
    with numpyro.plate("rows", x.shape[0], subsample_size=rows) as i:
        numpyro.sample("y", law(out(draw, x[i]), name), obs=y[i])


def load(data, name, select):
    """Training and test rows; of a selection both are from the training rows."""
    z = np.load(data / f"{name}.npz")
    if name == "mnist":
        x = np.concatenate([z["train_x"], z["test_x"]]).reshape(-1, 784) / 255.0
        x = (x - 0.13) / 0.31
        y = np.concatenate([z["train_y"], z["test_y"]]).astype(int)
        train, test = np.arange(60_000), np.arange(60_000, 70_000)
    else:
        if name == "covtype":
            x, y, numeric = z["x"].astype(float), z["y"].astype(int) - 1, 10
        else:
            columns = np.stack([z["dep_hour"], z["day"], z["distance"]], 1).astype(float)
            codes = (z["month"] - 1, 12), (z["carrier"], 16), (z["origin"], 3)
            x = np.concatenate([columns, *(np.eye(n)[c] for c, n in codes)], 1)
            y, numeric = z["arr_delay"].astype(float), 3
        order = np.random.RandomState(0).permutation(len(y))
        test, train = np.split(order, [len(y) // 5])
    if select:
        test, train = np.split(np.random.RandomState(1).permutation(train), [len(train) // 10])
    if name != "mnist":
        x[:, :numeric] -= x[train, :numeric].mean(0)
        x[:, :numeric] /= x[train, :numeric].std(0)
    if name == "flights":
        y = (y - y[train].mean()) / y[train].std()
    kind = "f4" if name == "flights" else "i4"
    return [(jnp.asarray(x[k], "f4"), jnp.asarray(y[k], kind)) for k in (train, test)]


def scores(draws, name, x, y, rows=5_000):
    """Negative log density, error and calibration, over chunks of rows and draws one by one."""
    count = len(draws["b0"])

    @jax.jit
    def chunk(draws, x, y):
        def add(total, draw):
            found = law(out(draw, x), name)
            density = jnp.logaddexp(total[0], found.log_prob(y))
            if name != "flights":
                return (density, total[1] + found.probs / count), None
            t = (y - found.loc) / found.scale
            q = 1 + t**2 / 4
            below = 0.5 + 0.375 * t / jnp.sqrt(q) * (1 - t**2 / q / 12)  # 4 degrees of freedom
            return (density, total[1] + jnp.stack([found.loc, below], 1) / count), None

        start = jnp.full(len(x), -jnp.inf), jnp.zeros((len(x), 2 if name == "flights" else width))
        return jax.lax.scan(add, start, draws)[0]

    width = CASES[name][0][-1]
    parts = [chunk(draws, x[k : k + rows], y[k : k + rows]) for k in range(0, len(y), rows)]
    density, other = (np.concatenate([np.asarray(p[j], float) for p in parts]) for j in (0, 1))
    y, loss = np.asarray(y), np.log(count) - density.mean()
    if name == "flights":
        levels = np.linspace(0.05, 0.95, 19)
        inside = np.array([(abs(2 * other[:, 1] - 1) <= level).mean() for level in levels])
        return loss, np.sqrt(((y - other[:, 0]) ** 2).mean()), abs(inside - levels).mean()
    right, sure = other.argmax(1) == y, other.max(1)
    bins = np.minimum((sure * 15).astype(int), 14)
    gaps = np.bincount(bins, weights=right - sure, minlength=15)
    return loss, 1 - right.mean(), abs(gaps).sum() / len(y)


def one(data, name, method, key, chosen, select=False):
    _, rows, passes = CASES[name]
    name = name.split("-")[0]
    (x, y), test = load(data, name, select)
    total = len(y) * passes // rows

    def model(x, y):
        return network(name, chosen["scale"], x, y)

    initial = {"init_strategy": init_to_sample()}
    begin = time.perf_counter()
    if method == "ensemble":
        start = Ensemble(total, chosen["ensemble"])
        kernel = SGHMC(model, step_size=1e-5, friction=1.0, start=start, **initial)
        keys = random.split(random.key(key), MEMBERS)
        draws = kernel.init(keys, 0, None, (x, y), {}).z
    else:
        size, share, temperature = chosen[method]
        every = int(total * share) // (WARMUP + DRAWS)
        mcmc = MCMC(
            {"CCAdL": CCAdL, "SGMCLMC": SGMCLMC}.get(method, SGHMC)(
                model,
                step_size=cyclical(3 * size, size, every) if "cycles" in method else size,
                steps_per_sample=None if "cycles" in method else every,
                friction=2.0 if method == "SGMCLMC" else 0.05 / size,
                temperature=temperature,
                metric="diagonal",
                start=Ensemble(total - every * (WARMUP + DRAWS), chosen["ensemble"]),
                **initial,
            ),
            num_warmup=WARMUP,
            num_samples=DRAWS,
            num_chains=MEMBERS,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(key), x, y)
        draws = mcmc.get_samples()
    found = [float(v) for v in scores(draws, name, *test)]
    return [*found, time.perf_counter() - begin]


def shown(name, found):
    """Rows of the table: means and standard errors over the keys."""
    base = np.array(found["ensemble"])
    for method, values in found.items():
        values = np.array(values)
        many = max(len(values) - 1, 1) ** 0.5 * len(values) ** 0.5
        both = [(v.mean(), ((v - v.mean()) ** 2).sum() ** 0.5 / many) for v in values.T]
        change = base[:, 0] - values[:, 0]
        error = ((change - change.mean()) ** 2).sum() ** 0.5 / many
        cells = [f"{m:.4f} ± {e:.4f}" for m, e in both[:3]]
        gain = "" if method == "ensemble" else f"{change.mean():+.4f} ± {error:.4f}"
        better = "" if not gain or not error else "yes" if change.mean() > 2 * error else "no"
        yield [name, method, *cells, gain, better, f"{both[3][0]:.0f}"]


def picture(path, everything):
    """The gain of each key over the ensemble, in each case."""
    size, methods = (9, 2.6), [method for method in BEGIN if method != "ensemble"]
    figure, axes = plt.subplots(
        1, len(everything), figsize=size, layout="constrained", squeeze=False
    )
    for axis, (name, found) in zip(axes[0], everything.items(), strict=True):
        base = np.array(found["ensemble"])[:, 0]
        for place, method in enumerate(methods):
            if method in found:
                gain = base - np.array(found[method])[:, 0]
                axis.plot(np.full(len(gain), place), gain, "o", ms=4, color=f"C{place + 1}")
        axis.axhline(0, color="0.6", linewidth=1)
        axis.set(title=name, xticks=[], xlim=(-0.6, 3.6))
    axes[0, 0].set_ylabel("log density less\nthat of the ensemble")
    dots = [plt.Line2D([], [], marker="o", ls="", ms=4, color=f"C{k + 1}") for k in range(4)]
    figure.legend(dots, methods, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def select(data, name, report):
    """Scale of the prior, learning rate and step sizes, on validation rows."""
    chosen = {"scale": SCALES[0], **BEGIN}

    def loss(method, **change):
        given = {**chosen, **change}
        if method != "ensemble":
            given[method] = Settings(given[method])
        found = one(data, name, method, SELECTION_KEY, given, select=True)
        report(name, method, change, found)
        return np.nan_to_num(found[0], nan=np.inf)

    losses = {scale: loss("ensemble", scale=scale) for scale in SCALES}
    chosen["scale"] = min(losses, key=losses.get)
    for method, begin in BEGIN.items():
        tried, new = {}, [begin]
        while new:
            tried |= {value: loss(method, **{method: value}) for value in new}
            k = LADDER.index(min(tried, key=tried.get))
            new = [v for v in LADDER[max(k - 1, 0) : k + 2] if v not in tried]
        chosen[method] = LADDER[k]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--keys", type=int, default=5)
    parser.add_argument("--select", action="store_true", help="choose settings, no test rows")
    parser.add_argument("--picture", type=Path, help="where the gains are drawn")
    parser.add_argument("--save", type=Path, help="a JSON file for what was found so far")
    options = parser.parse_args()
    saved, rows, everything = [], [], {}

    def report(*found):
        print(*found, file=sys.stderr, flush=True)
        saved.append(found)
        if options.save:
            options.save.write_text(json.dumps(saved, indent=1))

    for name in options.only:
        if options.select:
            print(f'"{name}": {select(options.data, name, report)},', flush=True)
            continue
        if name not in CHOSEN:
            parser.error(f"no settings for {name}: run --select, and fill `CHOSEN`")
        found = {method: [] for method in BEGIN if method in CHOSEN[name]}
        for key in range(options.keys):
            for method in found:
                new = one(options.data, name, method, key, CHOSEN[name])
                found[method].append(new)
                report(name, method, key, new)
        rows += shown(name, found)
        everything[name] = found
    if rows:
        header = ["data", "", "log loss", "error", "calibration", "gain", "better", "s"]
        print(table(header, rows))
    if rows and options.picture:
        picture(options.picture, everything)


if __name__ == "__main__":
    main()

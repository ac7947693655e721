# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Bayesian softmax regression by minibatches and by NUTS on all data, side by side in ArviZ.

Without arguments it classifies the handwritten digits that come with scikit-learn. With
``--data`` it reads your own file: a table as text, its cells divided by commas, semicolons, tabs
or spaces, with a header or without; or an .npz with the arrays ``x`` and ``y``.
``make demo DATA=path`` does that.
"""

import argparse
from functools import partial
from pathlib import Path
import time
import warnings

warnings.filterwarnings("ignore", category=FutureWarning)  # ArviZ 0.23 announces ArviZ 1.0

import arviz as az
from features_and_labels import Data, UnusableFile, read
import jax
from jax import random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, log_likelihood
import pandas as pd

from numpyro_sgmcmc import CCAdL, full_data, to_arviz

FIRST_GENERATION = int(az.__version__.split(".")[0]) < 1
CHAINS = 4


def model(x, y=None, classes=10, batch_size=100):
    dims = ["feature", "class"]
    w = numpyro.sample(
        "w",
        dist.Normal(0, 1).expand([x.shape[1], classes]).to_event(2),
        infer={"event_dims": dims},
    )
    b = numpyro.sample(
        "b", dist.Normal(0, 1).expand([classes]).to_event(1), infer={"event_dims": dims[1:]}
    )
    with numpyro.plate("rows", x.shape[0], subsample_size=min(batch_size, x.shape[0])) as i:
        logits = x[i] @ w + b
        numpyro.sample("y", dist.Categorical(logits=logits), obs=None if y is None else y[i])


def load(path, label):
    """The user's file, or the digits."""
    if path is not None:
        return read(path, label)
    from sklearn.datasets import load_digits

    digits = load_digits()
    names, classes = list(digits.feature_names), [str(k) for k in range(10)]
    return Data(digits.data, digits.target, names, classes, "handwritten digits")


def standardised(x, train):
    """Features of mean 0 and equal variance in the rows to learn from, together of about 10."""
    # rounding errors give columns of equal numbers a small standard deviation
    scale = np.where(np.ptp(x[train], axis=0) > 0, x[train].std(0), 1)
    return (x - x[train].mean(0)) / scale / np.sqrt(x.shape[1] / 10)


def held_out_scores(draws, x, y, classes):
    """Accuracy and mean log predictive probability of the held-out rows."""
    every = {k: v[:: max(1, len(v) // 400)] for k, v in draws.items()}
    view = full_data(partial(model, classes=classes))
    terms = jnp.stack(
        [log_likelihood(view, every, x, jnp.full(len(x), k))["y"] for k in range(classes)], -1
    )
    predictive = jax.nn.logsumexp(terms, axis=0) - jnp.log(terms.shape[0])
    accuracy = jnp.mean(jnp.argmax(predictive, -1) == y)
    return float(accuracy), float(jnp.mean(predictive[jnp.arange(len(y)), y]))


def sample(name, kernel, args, num_warmup, num_samples, extra_fields=()):
    print(f"\n{name}: {CHAINS} chains", flush=True)
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=CHAINS,
        chain_method="vectorized",
    )
    start = time.perf_counter()
    mcmc.run(random.key(1), *args, extra_fields=extra_fields)
    jax.block_until_ready(mcmc.get_samples())
    return mcmc, time.perf_counter() - start


def posterior(data):
    return data["posterior"] if FIRST_GENERATION else data["posterior"].to_dataset()


def chosen_weights(data):
    """A few weights that the data say much about: the largest of some classes."""
    w = posterior(data)["w"]
    mean = w.mean(("chain", "draw")).values
    cells = [(int(np.abs(mean[:, c]).argmax()), c) for c in range(min(4, mean.shape[1]))]
    labels = [f"w[{w.feature.values[f]}, {w['class'].values[c]}]" for f, c in cells]
    return cells, labels


def weights_as_data(data, cells, labels):
    w = posterior(data)["w"].values
    chosen = {name: w[:, :, f, c] for name, (f, c) in zip(labels, cells, strict=True)}
    return az.from_dict(chosen) if FIRST_GENERATION else az.from_dict({"posterior": chosen})


def save(picture, path):
    if hasattr(picture, "savefig"):
        picture.savefig(path)
    else:
        np.ravel(picture)[0].figure.savefig(path, bbox_inches="tight")
    plt.close("all")
    print(f"  {path}")


def draw_pictures(ours, reference, folder):
    folder.mkdir(exist_ok=True)
    print("\nPictures:")
    save(az.plot_autocorr(ours, max_lag=60), folder / "autocorrelation.png")
    trace = az.plot_trace if FIRST_GENERATION else az.plot_trace_dist
    picture = trace(ours)
    if FIRST_GENERATION:
        picture[0, 0].figure.tight_layout()
    save(picture, folder / "trace.png")
    if reference is None:
        pictured = az.plot_posterior(ours) if FIRST_GENERATION else az.plot_dist(ours)
    elif FIRST_GENERATION:
        pictured = az.plot_density([ours, reference], data_labels=["CCAdL", "NUTS"])
    else:
        pictured = az.plot_dist({"CCAdL": ours, "NUTS": reference})
        pictured.add_legend("model")
    save(pictured, folder / "posterior.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a table as text, or an .npz, of features and a label")
    parser.add_argument("--label", help="name of the label's column in a table")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--skip-nuts", action="store_true")
    parser.add_argument("--pictures", type=Path, default=Path("pictures"))
    options = parser.parse_args()

    try:
        x, y, features, classes, seen = load(options.data, options.label)
    except UnusableFile as error:
        parser.exit(2, f"{error}\n")
    print(f"{options.data or 'scikit-learn'}: {seen}")
    order = np.random.default_rng(0).permutation(len(y))
    held_out = order[: len(y) // 5]
    train = order[len(y) // 5 :]
    x = standardised(x, train)
    args = jnp.asarray(x[train], jnp.float32), jnp.asarray(y[train])
    test = jnp.asarray(x[held_out], jnp.float32), jnp.asarray(y[held_out])
    print(
        f"Softmax regression: {len(train):,} rows, {x.shape[1]} features, {len(classes)} classes;"
        f" {len(held_out):,} rows held out"
    )

    bound = partial(model, classes=len(classes), batch_size=options.batch_size)
    kernel = CCAdL(bound, steps_per_sample=20)
    runs = {"CCAdL": sample("CCAdL, minibatches", kernel, args, 300, 1_000)}
    if not options.skip_nuts:
        runs["NUTS"] = sample("NUTS, all data", NUTS(full_data(bound)), args, 300, 500)

    coords = {"feature": features, "class": classes}
    data = {name: to_arviz(mcmc, coords=coords) for name, (mcmc, _) in runs.items()}
    cells, labels = chosen_weights(data["CCAdL"])
    chosen = {name: weights_as_data(d, cells, labels) for name, d in data.items()}
    columns = ["mean", "sd", "ess_bulk", "r_hat"]
    tables = {name: az.summary(d)[columns] for name, d in chosen.items()}
    print("\nThe largest weights of some classes, by ArviZ\n")
    print(pd.concat(tables, axis=1).astype(float).round(3).to_string())

    print("\n                                " + "".join(f"{name:>12}" for name in runs))
    rows = {"held-out accuracy": [], "held-out log score": [], "seconds": []}
    rows |= {"smallest bulk ESS of w": [], "smallest ESS a second": []}
    for name, (mcmc, seconds) in runs.items():
        accuracy, score = held_out_scores(mcmc.get_samples(), *test, len(classes))
        ess = float(az.ess(posterior(data[name])[["w"]])["w"].min())
        for row, value in zip(rows, (accuracy, score, seconds, ess, ess / seconds), strict=True):
            rows[row].append(value)
    for row, values in rows.items():
        print(f"{row:32}" + "".join(f"{value:12.4g}" for value in values))
    if "NUTS" in data:
        ours, theirs = (posterior(data[k])["w"].std(("chain", "draw")) for k in ("CCAdL", "NUTS"))
        low, middle, high = np.quantile(ours / theirs, [0.05, 0.5, 0.95])
        print(
            f"\nPosterior standard deviations of w relative to NUTS: median {middle:.3f}, nine in"
            f" ten from {low:.3f} to {high:.3f}."
        )
        if rows["smallest ESS a second"][1] > rows["smallest ESS a second"][0]:
            print(
                f"With {len(train):,} rows NUTS can afford the gradient on all of them, and is the"
                " better choice here. Its cost grows with the rows, that of a minibatch does not."
            )
    draw_pictures(chosen["CCAdL"], chosen.get("NUTS"), options.pictures)


if __name__ == "__main__":
    main()

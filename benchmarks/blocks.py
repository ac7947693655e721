# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
A change to NumPyro: under its progress bar a call takes as many samples as fit in a tenth of a
second, whatever the kernel, instead of one.

    python benchmarks/blocks.py

prints it as a patch of ``numpyro/util.py``; ``benchmarks/running.py --only bar`` measures it.
"""

from collections.abc import Callable
import difflib
import inspect

import numpyro.util

BEFORE = """\
            with tqdm.trange(upper, miniters=progress_rate) as t:
                for i in t:
                    vals = _body_fn(i, *vals)

                    t.set_description(progbar_desc(i), refresh=False)
                    if diagnostics_fn:
                        t.set_postfix_str(diagnostics_fn(vals[0]), refresh=False)
"""

AFTER = """\
            @partial(maybe_jit, donate_argnums=3)
            @cached_by(fori_collect, body_fun, transform)
            def _block_fn(lower, upper, *vals):
                return fori_loop(lower, upper, lambda i, vals: _body_fn(i, *vals), vals)

            i, block = 0, 1
            with tqdm.tqdm(total=upper) as t:
                while i < upper:
                    start, last = time.perf_counter(), min(i + block, upper)
                    vals = jax.block_until_ready(_block_fn(i, last, *vals))
                    # a call for each sample costs more than many a sample
                    if time.perf_counter() - start < 0.1:
                        block *= 2

                    t.set_description(progbar_desc(last - 1), refresh=False)
                    if diagnostics_fn:
                        t.set_postfix_str(diagnostics_fn(vals[0]), refresh=False)
                    t.update(last - i)
                    i = last
"""

IMPORT = "from typing import Any, "


def sources() -> tuple[str, str]:
    """
    ``numpyro/util.py`` before and after.

    :raises RuntimeError: if NumPyro's loop is no longer the one that the change is for.
    """
    before = inspect.getsource(numpyro.util)
    if BEFORE not in before or IMPORT not in before:
        raise RuntimeError(f"NumPyro {numpyro.__version__} has another loop under its bar.")
    after = before.replace(BEFORE, AFTER).replace(IMPORT, f"import time\n{IMPORT}", 1)
    return before, after


def fori_collect_in_blocks() -> Callable:
    """``numpyro.util.fori_collect`` with the change."""
    names = dict(vars(numpyro.util))
    exec(compile(sources()[1], "numpyro/util.py", "exec"), names)
    return names["fori_collect"]


def main() -> None:
    lines = (text.splitlines(keepends=True) for text in sources())
    print("".join(difflib.unified_diff(*lines, "a/numpyro/util.py", "b/numpyro/util.py")))


if __name__ == "__main__":
    main()

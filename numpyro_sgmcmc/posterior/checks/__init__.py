# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Checks of arguments, models and rows: a list of checks for each moment.

1. ``arguments``: before a model is read (``checked_arrays``, ``check_data``);
2. ``sites``, ``latents`` and ``disk``: a model as it was read (``sites.CHECKS``);
3. ``run``: this model for this kernel (``run.CHECKS``);
4. ``devices``: the model on each of the devices that rows are spread over (``check_spread``);
5. ``all_rows``: every row, before anything is drawn (``check_rows``).

A check raises with cause, place and remedy. A new check is a function, and a line in its list.
Errors that the code of a model raises by itself are explained by ``exceptions``.
"""

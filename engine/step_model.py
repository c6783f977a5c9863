"""The step model: what a step costs, fitted to the steps that were seen.

Owns the last observations and the fit device_ns = fixed + p x prefill + d x decode + c x context
tokens read, all coefficients non-negative. core observes each step; the slo policy plans with the
fit, and each refit goes on record, so that explanations use the one that was in force. Knows no
request.
"""

from itertools import combinations

import numpy as np
import numpy.typing as npt

from telemetry.records import StepModel

WINDOW_STEPS = 2000
REFIT_STEPS = 200
FIRST_FITS = (25, 50, 100)
"""Steps after which a young engine fits, so that nobody plans blind for long."""
STALL_TIMES = 4.0
"""A step that took so many times what the fit says was stopped, not slow: a machine that slept, a
process that was held. One in hundreds would bend every coefficient; the others are fitted anew.
"""
SUBSETS = [list(chosen) for size in range(4, 0, -1) for chosen in combinations(range(4), size)]

Floats = npt.NDArray[np.float64]


def fit_non_negative(features: Floats, targets: Floats) -> Floats:
    """Return the least squares solution with no negative coefficient, features [n, 4].

    Four unknowns have 15 supports: the best feasible one is the optimum (Lawson and Hanson, 1974,
    chapter 23, by exhaustion). A rank-deficient support is left to a smaller one.
    """
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    scaled = features / scale
    gram, moment = scaled.T @ scaled, scaled.T @ targets
    best, least = np.zeros(4), 0.0
    for support in SUBSETS:
        part = gram[np.ix_(support, support)]
        if np.linalg.cond(part) > 1e12:
            continue
        solution = np.linalg.solve(part, moment[support])
        if solution.min() < 0:
            continue
        # The residual's square less the constant term of the targets' own square.
        loss = float(solution @ part @ solution - 2 * solution @ moment[support])
        if loss < least:
            least, best = loss, np.zeros(4)
            best[support] = solution
    return np.asarray(best / scale)


class StepTimes:
    """The window of observed steps and the fit in force, None before the first."""

    def __init__(self) -> None:
        self.fitted: StepModel | None = None
        self._features = np.ones((WINDOW_STEPS, 4))
        self._targets = np.zeros(WINDOW_STEPS)
        self._seen = 0

    def observe(
        self, *, step: int, prefill: int, decode: int, context: int, device_ns: int
    ) -> StepModel | None:
        """Take a step in (tokens and ns); return the new fit when it was time for one."""
        slot = self._seen % WINDOW_STEPS
        self._features[slot, 1:] = prefill, decode, context
        self._targets[slot] = device_ns
        self._seen += 1
        if self._seen % REFIT_STEPS and self._seen not in FIRST_FITS:
            return None
        kept = min(self._seen, WINDOW_STEPS)
        features, targets = self._features[:kept], self._targets[:kept]
        solution = fit_non_negative(features, targets)
        usual = targets <= STALL_TIMES * np.maximum(features @ solution, np.median(targets))
        if not usual.all():
            features, targets = features[usual], targets[usual]
            solution = fit_non_negative(features, targets)
        error = np.abs(features @ solution - targets).mean() / max(targets.mean(), 1.0)
        fixed, p, d, c = (float(value) for value in solution)
        self.fitted = StepModel(step=step, fixed=fixed, p=p, d=d, c=c, error=float(error))
        return self.fitted

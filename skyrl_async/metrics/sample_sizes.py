"""How many fresh tokens the tokens of a step are worth, as shares: sums over tokens in, metrics out.

The sums are those of ``algorithms.sample_sizes``, under ``<of>ess_count``, ``<of>ess_weights`` and ``<of>ess_squares``.
"""

from collections.abc import Mapping

_WEIGHTS = "ess_weights"


def effective_shares(sums: Mapping[str, float]) -> dict[str, float]:
    """``policy/<of>ess``: ``(sum w)^2 / (n sum w^2)``, in (0, 1], of every set of weights in ``sums``."""
    sets = [name.removesuffix(_WEIGHTS) for name in sums if name.endswith(_WEIGHTS)]
    return {
        f"policy/{of}ess": sums[f"{of}{_WEIGHTS}"] ** 2 / (sums[f"{of}ess_count"] * sums[f"{of}ess_squares"])
        for of in sets
    }

"""The algorithm's parts as the configuration names them.

Flows in: the configuration. Flows out: values and functions that training and the trainer are made with.
"""

from skyrl_async.algorithms.loss_constants import LossConstants
from skyrl_async.config.schema import AlgorithmConfig


def loss_constants(algorithm: AlgorithmConfig) -> LossConstants:
    """Of every policy loss."""
    return LossConstants(
        eps_clip_low=algorithm.eps_clip_low,
        eps_clip_high=algorithm.eps_clip_high,
        clip_ratio_c=algorithm.clip_ratio_c,
        tis_cap=algorithm.tis_cap,
        cispo_eps_clip_low=algorithm.cispo.cispo_eps_clip_low,
        cispo_eps_clip_high=algorithm.cispo.cispo_eps_clip_high,
        dppo_delta_low=algorithm.dppo.delta_low,
        dppo_delta_high=algorithm.dppo.delta_high,
        sapo_tau_pos=algorithm.sapo.tau_pos,
        sapo_tau_neg=algorithm.sapo.tau_neg,
    )

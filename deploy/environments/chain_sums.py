"""Sums of reasoning-gym, in the environment that verifiers has for it; needs `reasoning-gym`.

An environment takes its arguments here: `verifiers:chain_sums` in a run file names this module.
"""

import verifiers as vf


def load_environment(sums: int = 1000, held_out: int = 100, seed: int = 0) -> vf.Environment:
    """The environment with so many sums to train on, and so many held out."""
    return vf.ReasoningGymEnv(
        "chain_sum", num_train_examples=sums, num_eval_examples=held_out, seed=seed
    )

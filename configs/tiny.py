"""MuLoCo with four workers on all of Shakespeare, by the byte, on a CPU in minutes.

    python run.py

The same as `muloco.py`. It takes two to three minutes on two quiet CPU cores, and
reaches an eval_loss of 1.764 nats per token (standard deviation 0.014 over three
seeds).

Paper: Therien et al., MuLoCo, https://arxiv.org/abs/2505.23725
"""

from ml_collections import ConfigDict

from configs import muloco


def get_config() -> ConfigDict:
    return muloco.get_config()

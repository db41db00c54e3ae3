"""Published settings of Muon, as keywords of `muon`.

One value may differ, as in `muon(0.02, **MOONLIGHT | {"weight_decay": 0.0})`.

References:
    Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon>`_, 2024
    Liu et al., `Muon is Scalable for LLM Training <https://arxiv.org/abs/2502.16982>`_,
    2025 (Moonlight)
    Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
"""

from muloco_jax import coefficients, momentum, routing

# The MuLoCo paper's, as its code has them (but `eps`), which are the defaults.
PAPER = {
    "ns_coeffs": coefficients.DION,
    "beta": 0.9,
    "nesterov": False,
    "momentum": "heavy_ball",
    "scale": momentum.spectral,
    "adam_b1": 0.9,
    "adam_b2": 0.99,
}

# Moonlight's (Liu et al., 2025, equations 1 and 4), with its weight decay. The learning
# rate may be what is right for AdamW.
MOONLIGHT = {
    "ns_coeffs": coefficients.JORDAN,
    "beta": 0.95,
    "eps": 1e-7,
    "weight_decay": 0.1,
    "nesterov": True,
    "momentum": "heavy_ball",
    "scale": momentum.match_rms_adamw,
    "adam_b1": 0.9,
    "adam_b2": 0.95,
}

# Its variant that measures the RMS of each update instead (section 2.2).
MOONLIGHT_UPDATE_NORM = MOONLIGHT | {"scale": momentum.adamw_rms, "update_norm": True}

# The original (Jordan et al., 2024) as it is now, which is `torch.optim.Muon` too.
JORDAN_2024 = {
    "ns_coeffs": coefficients.JORDAN,
    "beta": 0.95,
    "eps": 1e-7,
    "nesterov": True,
    "momentum": "ema",
    "scale": momentum.width,
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "adam_eps": 1e-10,
}

# What `optax.contrib.muon` computes by default, with NAdam on the other side.
OPTAX = {
    "ns_coeffs": coefficients.JORDAN,
    "beta": 0.95,
    "eps": 1e-8,
    "nesterov": True,
    "momentum": "debiased",
    "scale": momentum.width,
    "adam_b1": 0.9,
    "adam_b2": 0.999,
    "adam_nesterov": True,
    "adam_weight_decay": 0.0,
    "muon_weight_dimension_numbers": routing.by_ndim,
}

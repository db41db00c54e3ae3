"""Eight CPU devices, float64, and no silent broadcasting, before JAX starts."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

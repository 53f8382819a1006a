"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over a paged cache of latents."""

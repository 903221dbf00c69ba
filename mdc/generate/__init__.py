"""Captions from images."""

from mdc.generate.samplers import SAMPLERS, Generated, default_sampler, fill, generate

__all__ = ["SAMPLERS", "Generated", "default_sampler", "fill", "generate"]

"""Choices that several sections of the configuration have."""

from enum import Enum


class DType(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"

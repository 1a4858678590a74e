"""Vision encoders of Kimi-K2.5, LFM2-VL and Qwen2.5-VL in JAX, packed into ahead-of-time compiled buckets."""

from jaxvit import errors
from jaxvit.compare import Report, compare
from jaxvit.encoder import Encoder, Encodings, load
from jaxvit.media import Image, Video

__version__ = "0.1.0"
__all__ = ["Encoder", "Encodings", "Image", "Report", "Video", "__version__", "compare", "errors", "load"]

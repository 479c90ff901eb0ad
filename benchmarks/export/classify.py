"""``python benchmarks/export/classify.py MODEL.onnx IMAGES.npy OUT.npy``: logits from onnxruntime, 100 images a call.

Needs onnxruntime and numpy only.
"""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import onnxruntime


def main() -> None:
    """Write the logits of all images."""
    assert importlib.util.find_spec("fractrain_fx") is None
    model, images, out = sys.argv[1:]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    x, name = np.load(images), session.get_inputs()[0].name
    np.save(out, np.concatenate([session.run(None, {name: x[i : i + 100]})[0] for i in range(0, len(x), 100)]))


if __name__ == "__main__":
    main()

"""The kernels of gates. Imported at the first call, because importing Triton takes a moment.

Their matrices are so small that all factors of a product are multiplied at once and then summed.
"""

# Triton reads annotations and the source of these functions, so this file keeps to its language.

import triton
import triton.language as tl

__all__ = ["chosen", "chosen_errors", "embedded", "embedded_errors"]


@triton.jit
def _tile(x, row, ROWS, column, COLUMNS, STRIDE):
    """Some rows and columns of a matrix, and 0 outside it."""
    there = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(x + row[:, None] * STRIDE + column[None, :], mask=there, other=0.0)


@triton.jit
def _put(x, value, row, ROWS, column, COLUMNS, STRIDE):
    there = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    tl.store(x + row[:, None] * STRIDE + column[None, :], value, mask=there)


@triton.jit
def _row(x, column, COLUMNS):
    return tl.load(x + column, mask=column < COLUMNS, other=0.0)


@triton.jit
def _times(x, w):
    """``x @ w.T``: the outputs of a layer."""
    return tl.sum(x[:, None, :] * w[None, :, :], 2)


@triton.jit
def _back(g, w):
    """``g @ w``: the gradient of a layer's inputs."""
    return tl.sum(g[:, :, None] * w[None, :, :], 1)


@triton.jit
def _outer(g, x):
    """``g.T @ x``: the gradient of a layer's weight."""
    return tl.sum(g[:, :, None] * x[:, None, :], 0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit
def embedded(
    x, w1, b1, w2, b2, out, between, count, I, H, O,  # noqa: E741
    SAMPLES: tl.constexpr, CHUNK: tl.constexpr, WH: tl.constexpr, WO: tl.constexpr,
):  # fmt: skip
    """``w2 @ relu(w1 @ x + b1) + b2`` for some samples, and the values between both layers."""
    s = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    h, o = tl.arange(0, WH), tl.arange(0, WO)
    hidden = tl.zeros([SAMPLES, WH], tl.float32) + _row(b1, h, H)[None, :]
    for begin in range(0, I, CHUNK):
        i = begin + tl.arange(0, CHUNK)
        hidden += _times(_tile(x, s, count, i, I, I), _tile(w1, h, H, i, I, I))
    hidden = tl.where(hidden < 0.0, 0.0, hidden)
    _put(between, hidden, s, count, h, H, H)
    _put(out, _times(hidden, _tile(w2, o, O, h, H, H)) + _row(b2, o, O)[None, :], s, count, o, O, O)


@triton.jit
def embedded_errors(
    g, x, between, w1, w2, of_x, of_w1, of_b1, of_w2, of_b2, count, I, H, O,  # noqa: E741
    SAMPLES: tl.constexpr, CHUNK: tl.constexpr, WH: tl.constexpr, WO: tl.constexpr,
):  # fmt: skip
    """The gradients of ``CHUNK`` inputs and of their weights over all samples; the first program's also of the rest."""
    program = tl.program_id(0)
    i, h, o = program * CHUNK + tl.arange(0, CHUNK), tl.arange(0, WH), tl.arange(0, WO)
    first_weight, second_weight = _tile(w1, h, H, i, I, I), _tile(w2, o, O, h, H, H)
    first, first_bias = tl.zeros([WH, CHUNK], tl.float32), tl.zeros([WH], tl.float32)
    second, second_bias = tl.zeros([WO, WH], tl.float32), tl.zeros([WO], tl.float32)
    for begin in range(0, count, SAMPLES):
        s = begin + tl.arange(0, SAMPLES)
        hidden, upstream = _tile(between, s, count, h, H, H), _tile(g, s, count, o, O, O)
        of_hidden = tl.where(hidden > 0.0, _back(upstream, second_weight), 0.0)
        _put(of_x, _back(of_hidden, first_weight), s, count, i, I, I)
        first += _outer(of_hidden, _tile(x, s, count, i, I, I))
        first_bias += tl.sum(of_hidden, 0)
        second += _outer(upstream, hidden)
        second_bias += tl.sum(upstream, 0)
    _put(of_w1, first, h, H, i, I, I)
    if program == 0:
        tl.store(of_b1 + h, first_bias, mask=h < H)
        _put(of_w2, second, o, O, h, H, H)
        tl.store(of_b2 + o, second_bias, mask=o < O)


@triton.jit
def _gate(part, x, h, packed, D, N, d, n):
    """The values of one of the cell's four gates before its function. ``packed``: see :func:`chosen`."""
    of_x, of_h, biases = packed + part * N * D, packed + 4 * N * D + part * N * N, packed + 4 * N * (D + N) + part * N
    values = _times(x, _tile(of_x, n, N, d, D, D)) + _times(h, _tile(of_h, n, N, n, N, N))
    return values + (_row(biases, n, N) + _row(biases + 4 * N, n, N))[None, :]


@triton.jit
def chosen(
    x, h, c, packed, choice, next_h, next_c, kept, count, D, N, K, LOWEST,
    HAS_STATE: tl.constexpr, SAMPLES: tl.constexpr, WD: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr,
):  # fmt: skip
    """A step of the controller for some samples, as ``native/csrc/gate_choice.cpp`` computes it.

    ``packed`` holds the cell's weights for inputs and state, their biases, and weight and bias of the head. ``kept``
    has the four gates of each sample, the tanh of its new state and the probabilities of its options.
    """
    s = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    d, n, k = tl.arange(0, WD), tl.arange(0, WN), tl.arange(0, WK)
    inputs = _tile(x, s, count, d, D, D)
    hidden, cell = tl.zeros([SAMPLES, WN], tl.float32), tl.zeros([SAMPLES, WN], tl.float32)
    if HAS_STATE:
        hidden, cell = _tile(h, s, count, n, N, N), _tile(c, s, count, n, N, N)
    entry = _sigmoid(_gate(0, inputs, hidden, packed, D, N, d, n))
    forget = _sigmoid(_gate(1, inputs, hidden, packed, D, N, d, n))
    candidate = _tanh(_gate(2, inputs, hidden, packed, D, N, d, n))
    leave = _sigmoid(_gate(3, inputs, hidden, packed, D, N, d, n))
    cell = forget * cell + entry * candidate
    bent = _tanh(cell)
    hidden = tl.where((n < N)[None, :], leave * bent, 0.0)
    head = packed + 4 * N * (D + N + 2)
    logits = _times(hidden, _tile(head, k, K, n, N, N)) + _row(head + K * N, k, K)[None, :]
    may = ((k >= LOWEST) & (k < K))[None, :]
    size = tl.where(may, tl.exp(logits - tl.max(tl.where(may, logits, float("-inf")), 1)[:, None]), 0.0)
    probability = size / tl.sum(size, 1)[:, None]
    best = tl.max(tl.where(may, probability, 0.0), 1)[:, None]
    picked = tl.min(tl.where(may & (probability == best), k[None, :], WK), 1)
    picked = tl.where(picked == WK, LOWEST, picked)  # no probability is the largest of NaN
    _put(choice, (k[None, :] == picked[:, None]).to(tl.float32), s, count, k, K, K)
    _put(next_h, hidden, s, count, n, N, N)
    _put(next_c, cell, s, count, n, N, N)
    stride = 5 * N + K
    _put(kept, entry, s, count, n, N, stride)
    _put(kept + N, forget, s, count, n, N, stride)
    _put(kept + 2 * N, candidate, s, count, n, N, stride)
    _put(kept + 3 * N, leave, s, count, n, N, stride)
    _put(kept + 4 * N, bent, s, count, n, N, stride)
    _put(kept + 5 * N, probability, s, count, k, K, stride)


@triton.jit
def _add(to, later, offset, value, row, ROWS, column, COLUMNS, HAS_LATER: tl.constexpr):
    """Store a gradient plus that of later steps."""
    if HAS_LATER:
        value += _tile(later + offset, row, ROWS, column, COLUMNS, COLUMNS)
    _put(to + offset, value, row, ROWS, column, COLUMNS, COLUMNS)


@triton.jit
def _add_gate(part, g, x, h, to, later, D, N, d, n, HAS_LATER: tl.constexpr):
    """The gradients of the weights and biases of one of the cell's four gates."""
    one, bias = tl.arange(0, 1), tl.sum(g, 0)[None, :]
    _add(to, later, part * N * D, _outer(g, x), n, N, d, D, HAS_LATER)
    _add(to, later, 4 * N * D + part * N * N, _outer(g, h), n, N, n, N, HAS_LATER)
    _add(to, later, 4 * N * (D + N) + part * N, bias, one, 1, n, N, HAS_LATER)
    _add(to, later, 4 * N * (D + N + 1) + part * N, bias, one, 1, n, N, HAS_LATER)


@triton.jit
def chosen_errors(
    of_choice, of_next_h, of_next_c, later, x, h, c, next_h, kept, packed, of_x, of_h, of_c, to, count, D, N, K,
    HAS_CHOICE: tl.constexpr, HAS_NEXT_H: tl.constexpr, HAS_NEXT_C: tl.constexpr, HAS_LATER: tl.constexpr,
    HAS_STATE: tl.constexpr, SAMPLES: tl.constexpr, WD: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr,
):  # fmt: skip
    """The gradients of :func:`chosen`; those of the weights in a row for each program, added to those of ``later``."""
    program, total = tl.program_id(0), 4 * N * (D + N + 2) + K * N + K
    to, later = to + program * total, later + program * total
    s = program * SAMPLES + tl.arange(0, SAMPLES)
    d, n, k, stride = tl.arange(0, WD), tl.arange(0, WN), tl.arange(0, WK), 5 * N + K
    entry, forget = _tile(kept, s, count, n, N, stride), _tile(kept + N, s, count, n, N, stride)
    candidate, leave = _tile(kept + 2 * N, s, count, n, N, stride), _tile(kept + 3 * N, s, count, n, N, stride)
    bent, inputs = _tile(kept + 4 * N, s, count, n, N, stride), _tile(x, s, count, d, D, D)
    hidden, cell = tl.zeros([SAMPLES, WN], tl.float32), tl.zeros([SAMPLES, WN], tl.float32)
    of_hidden, of_cell = tl.zeros([SAMPLES, WN], tl.float32), tl.zeros([SAMPLES, WN], tl.float32)
    of_logits = tl.zeros([SAMPLES, WK], tl.float32)
    if HAS_STATE:
        hidden, cell = _tile(h, s, count, n, N, N), _tile(c, s, count, n, N, N)
    if HAS_NEXT_H:
        of_hidden = _tile(of_next_h, s, count, n, N, N)
    if HAS_NEXT_C:
        of_cell = _tile(of_next_c, s, count, n, N, N)
    head = 4 * N * (D + N + 2)
    if HAS_CHOICE:
        # The one-hot passes its gradient on to the probabilities, and the softmax to the logits.
        probability, picked = _tile(kept + 5 * N, s, count, k, K, stride), _tile(of_choice, s, count, k, K, K)
        of_logits = probability * (picked - tl.sum(probability * picked, 1)[:, None])
        of_hidden += _back(of_logits, _tile(packed + head, k, K, n, N, N))
    _add(to, later, head, _outer(of_logits, _tile(next_h, s, count, n, N, N)), k, K, n, N, HAS_LATER)
    _add(to, later, head + K * N, tl.sum(of_logits, 0)[None, :], tl.arange(0, 1), 1, k, K, HAS_LATER)
    of_cell += of_hidden * leave * (1.0 - bent * bent)
    of_entry = of_cell * candidate * entry * (1.0 - entry)
    of_forget = of_cell * cell * forget * (1.0 - forget)
    of_candidate = of_cell * entry * (1.0 - candidate * candidate)
    of_leave = of_hidden * bent * leave * (1.0 - leave)
    _add_gate(0, of_entry, inputs, hidden, to, later, D, N, d, n, HAS_LATER)
    _add_gate(1, of_forget, inputs, hidden, to, later, D, N, d, n, HAS_LATER)
    _add_gate(2, of_candidate, inputs, hidden, to, later, D, N, d, n, HAS_LATER)
    _add_gate(3, of_leave, inputs, hidden, to, later, D, N, d, n, HAS_LATER)
    of_inputs = _back(of_entry, _tile(packed, n, N, d, D, D))
    of_inputs += _back(of_forget, _tile(packed + N * D, n, N, d, D, D))
    of_inputs += _back(of_candidate, _tile(packed + 2 * N * D, n, N, d, D, D))
    of_inputs += _back(of_leave, _tile(packed + 3 * N * D, n, N, d, D, D))
    _put(of_x, of_inputs, s, count, d, D, D)
    if HAS_STATE:
        weight = packed + 4 * N * D
        before = _back(of_entry, _tile(weight, n, N, n, N, N))
        before += _back(of_forget, _tile(weight + N * N, n, N, n, N, N))
        before += _back(of_candidate, _tile(weight + 2 * N * N, n, N, n, N, N))
        before += _back(of_leave, _tile(weight + 3 * N * N, n, N, n, N, N))
        _put(of_h, before, s, count, n, N, N)
        _put(of_c, of_cell * forget, s, count, n, N, N)

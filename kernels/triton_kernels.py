"""Triton kernels of the GPU backend: one program a row (or a few heads of it), so no row sees its neighbours.

Import this only where Triton is installed. `kernels.fused` launches them and holds the same operations in torch.
"""

# mypy: disable-error-code="no-untyped-def,attr-defined"

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(-7046029254386353131)  # 0x9E3779B97F4A7C15, as in kernels.sampling
MIX_1 = tl.constexpr(-4658895280553007687)
MIX_2 = tl.constexpr(-7723592293110705685)


@triton.jit
def rms_norm(x, weight, out, x_stride, n, eps, BLOCK: tl.constexpr):
    """out[row] = x[row] / rms(x[row]) * weight."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < n
    value = tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32)
    normed = value / tl.sqrt(tl.sum(value * value, axis=0) / n + eps)
    normed = normed.to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, (normed * scale).to(out.dtype.element_ty), mask=live)


@triton.jit
def add_rms_norm(x, residual, weight, n, eps, BLOCK: tl.constexpr):
    """In place: residual[row] += x[row], then x[row] = norm of that."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < n
    added = tl.load(x + row * n + at, mask=live, other=0.0).to(tl.float32)
    total = (tl.load(residual + row * n + at, mask=live, other=0.0).to(tl.float32) + added).to(x.dtype.element_ty)
    tl.store(residual + row * n + at, total, mask=live)
    value = total.to(tl.float32)
    normed = value / tl.sqrt(tl.sum(value * value, axis=0) / n + eps)
    normed = normed.to(x.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    tl.store(x + row * n + at, (normed * scale).to(x.dtype.element_ty), mask=live)


@triton.jit
def silu_mul(gate_up, out, n, BLOCK: tl.constexpr):
    """out[row] = silu(first half of gate_up[row]) * second half, a block of columns a program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    gate = tl.load(gate_up + row * 2 * n + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=live)


@triton.jit
def _to_pool(value, pool, FP8_MAX: tl.constexpr):
    """The type of the pool; one-byte pools saturate instead of turning to NaN."""
    if pool.dtype.element_ty == tl.float8e4nv:
        value = tl.minimum(tl.maximum(value.to(tl.float32), -FP8_MAX), FP8_MAX)
    return value.to(pool.dtype.element_ty)


@triton.jit
def rope_store(
    q,
    k,
    v,
    q_out,
    k_pool,
    v_pool,
    positions,
    slots,
    cos_sin,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    n_heads,
    n_kv_heads,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    FP8_MAX: tl.constexpr,
):
    """Rotate q into `q_out`, and k into its slot of the pool, where v goes too. A program: HEADS heads of one token.

    `*_token`, `*_head`: strides of the inputs. The pools are [slots, kv heads, 2 * HALF].
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts = tl.cdiv(n_heads, HEADS)
    kv_parts = tl.cdiv(n_kv_heads, HEADS)
    lane = tl.arange(0, HALF)[None, :]
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    cos = tl.load(cos_sin + position * 2 * HALF + lane)
    sin = tl.load(cos_sin + position * 2 * HALF + HALF + lane)
    if part < q_parts:
        head = (part * HEADS + tl.arange(0, HEADS))[:, None]
        source = q + token * q_token + head * q_head + lane
        first = tl.load(source, mask=head < n_heads, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=head < n_heads, other=0.0).to(tl.float32)
        target = q_out + (token * n_heads + head) * 2 * HALF + lane
        tl.store(target, (first * cos - second * sin).to(q_out.dtype.element_ty), mask=head < n_heads)
        tl.store(target + HALF, (second * cos + first * sin).to(q_out.dtype.element_ty), mask=head < n_heads)
    elif part < q_parts + kv_parts:
        head = ((part - q_parts) * HEADS + tl.arange(0, HEADS))[:, None]
        source = k + token * k_token + head * k_head + lane
        first = tl.load(source, mask=head < n_kv_heads, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=head < n_kv_heads, other=0.0).to(tl.float32)
        place = k_pool + (slot * n_kv_heads + head) * 2 * HALF + lane
        # through k's own type, as an unfused rotation would
        turned = (first * cos - second * sin).to(k.dtype.element_ty)
        tl.store(place, _to_pool(turned, k_pool, FP8_MAX), mask=head < n_kv_heads)
        turned = (second * cos + first * sin).to(k.dtype.element_ty)
        tl.store(place + HALF, _to_pool(turned, k_pool, FP8_MAX), mask=head < n_kv_heads)
    else:
        head = ((part - q_parts - kv_parts) * HEADS + tl.arange(0, HEADS))[:, None]
        source = v + token * v_token + head * v_head + lane
        place = v_pool + (slot * n_kv_heads + head) * 2 * HALF + lane
        first = tl.load(source, mask=head < n_kv_heads, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=head < n_kv_heads, other=0.0).to(tl.float32)
        tl.store(place, _to_pool(first, v_pool, FP8_MAX), mask=head < n_kv_heads)
        tl.store(place + HALF, _to_pool(second, v_pool, FP8_MAX), mask=head < n_kv_heads)


@triton.jit
def quantize_rows(x, values, scales, n, TINY: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK: tl.constexpr):
    """values[row] * scales[row] near x[row], the largest of a row at FP8_MAX."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < n
    value = tl.load(x + row * n + at, mask=live, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0), TINY) / FP8_MAX
    scaled = tl.minimum(tl.maximum(value / scale, -FP8_MAX), FP8_MAX)
    tl.store(values + row * n + at, scaled.to(tl.float8e4nv), mask=live)
    tl.store(scales + row, scale)


@triton.jit
def merge_chunks(parts, lse, indptr, out, n_heads, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr):
    """out[row] from the chunks indptr[row]:indptr[row+1] of its keys, in their order; lse is of base 2.

    One chunk is copied bit for bit.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = head < n_heads
    lane = tl.arange(0, HEAD_DIM)[None, :]
    top = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, HEAD_DIM], tl.float32)
    begin = tl.load(indptr + row)
    end = tl.load(indptr + row + 1)
    at = begin.to(tl.int64) * n_heads + head
    for _ in range(begin, end):
        mass = tl.load(lse + at, mask=live, other=0.0)
        part = tl.load(parts + at[:, None] * HEAD_DIM + lane, mask=live[:, None], other=0.0)
        new_top = tl.maximum(top, mass)
        keep = tl.exp2(top - new_top)
        weight = tl.exp2(mass - new_top)
        total = total * keep + weight
        mixed = mixed * keep[:, None] + part.to(tl.float32) * weight[:, None]
        top = new_top
        at += n_heads
    target = out + (row * n_heads + head[:, None]) * HEAD_DIM + lane
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _mix(z):
    """The finaliser of splitmix64; shifts are logical."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@triton.jit
def race(weights, keys, best, place, vocab, BLOCK: tl.constexpr):
    """Of each block of a row's tokens, the winner of the exponential race and its score, in float64."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = at < vocab
    weight = tl.load(weights + row * vocab + at, mask=live, other=0.0).to(tl.float64)
    bits = _mix(tl.load(keys + row) + (at + 1) * GOLDEN)
    uniform = (((bits >> 11) & ((1 << 53) - 1)).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2 ** -53
    rest = 1.0 - uniform
    safe = tl.where(rest > 0, rest, 1.0)
    # -log1p(-uniform); the first term mends the rounding of rest
    noise = ((safe - 1.0) + uniform) / safe - tl.log(safe)
    noise = tl.where(rest > 0, noise, float("inf"))
    score = tl.where(live, weight / noise, -1.0)
    tl.store(best + row * tl.num_programs(1) + block, tl.max(score, axis=0))
    winner = tl.argmax(score, axis=0, tie_break_left=True)
    tl.store(place + row * tl.num_programs(1) + block, block.to(tl.int64) * BLOCK + winner)

"""The kernels for chains of drafted tokens, one token per step (``--speculative-eagle-topk 1``).

Each is the index arithmetic of SGLang's Triton kernel of the same purpose, in PyTorch.
"""

from __future__ import annotations

import torch


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, target: torch.Tensor, source: torch.Tensor
) -> None:
    """Move nothing: the accepted tokens of a chain are where they stay."""
    if not torch.equal(target, source):
        raise NotImplementedError("KV of a tree of drafted tokens")


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """Write each request's slots into its row of the table."""
    lengths = (ends - starts).tolist()
    for row, start, own in zip(requests, starts, slots.split(lengths), strict=True):
        table[row, start : start + len(own)] = own.to(table.dtype)


def assign_extend_cache_locs_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """Read each request's slots from its row of the table."""
    rows = zip(requests, starts, ends, strict=True)
    found = torch.cat([table[row, start:end] for row, start, end in rows])
    slots[: len(found)] = found


def assign_draft_cache_locs_contiguous_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    width: int,
    topk: int,
    steps: int,
) -> None:
    """Read the slots that follow each request's tokens."""
    assign_extend_cache_locs_cpu(requests, table, lengths, lengths + topk * steps, slots, width)


def build_tree_kernel_efficient_cpu(
    parents: torch.Tensor,
    selected: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    indices: torch.Tensor,
    next_tokens: torch.Tensor,
    next_siblings: torch.Tensor,
    topk: int,
    depth: int,
    width: int,
    mask_mode: int,
) -> None:
    """Describe chains; their attention is causal and needs no mask."""
    if topk != 1:
        raise NotImplementedError("a tree of drafted tokens")
    steps = torch.arange(width)
    positions.copy_((lengths[:, None] + steps).flatten())
    indices.copy_(torch.arange(indices.numel()).view_as(indices))
    next_tokens.copy_(torch.where(steps + 1 < width, steps + 1, -1).expand_as(next_tokens))
    next_siblings.fill_(-1)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept the tokens of each chain up to the first that the target would not have chosen."""
    for row, own in enumerate(target_predict.view_as(candidates)):
        right = (candidates[row, 1:] == own[:-1]).long().cumprod(0)
        count = int(right.sum())
        accept_token_num[row] = count
        accept_index[row, : count + 1] = retrive_index[row, : count + 1]
        predicts[retrive_index[row, : count + 1]] = own[: count + 1].to(predicts.dtype)


def fill_bonus_tokens_cpu(
    tokens: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor, stride: int
) -> None:
    """Take the last accepted token of each request."""
    last = torch.arange(len(lengths)) * stride + lengths.long() - 1
    bonus.copy_(tokens.flatten()[last])

"""Finds the part of a module that is cut into stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_gpipe.model.blocks import Blocks

#: Share of the parameters, and of the operations where they are known, that singles out one of
#: several candidates.
CLEAR_SHARE = 0.8


def find_backbone(
    module: nn.Module, name: str | None, flops: Mapping[str, float] | None = None
) -> str:
    """Name the ``nn.Sequential`` that becomes the pipeline.

    Args:
        module: The user's module.
        name: Dotted name given by the user; ``None``: take the only :class:`Blocks`, the only
            outermost ``nn.Sequential`` of two or more layers, or the one that holds 80 % of the
            parameters and of the operations.
        flops: Operations of a forward in every submodule by dotted name, if they are known.

    Raises:
        ValueError: If there is no such module, or several, with the candidates and their shares.
    """
    if name is not None:
        return _checked(module, name)
    candidates = dict(_outermost(module, ""))
    if not candidates:
        raise ValueError(
            f"{type(module).__name__} has no backbone: GPipe needs an nn.Sequential of two or more"
            f" layers, which it can cut into stages. {_advice(module)}"
        )
    marked = [key for key, body in candidates.items() if isinstance(body, Blocks)]
    if len(marked) == 1:
        return marked[0]
    if len(candidates) == 1:
        return next(iter(candidates))
    total = sum(p.numel() for p in module.parameters()) or 1
    shares = {
        key: sum(p.numel() for p in body.parameters()) / total for key, body in candidates.items()
    }
    operations = max((flops or {}).get("", 0.0), 1.0)
    rows = []
    for key in sorted(candidates, key=lambda key: -shares[key]):
        row = f"  {key!r}: {shares[key]:.0%} of the parameters"
        if flops is not None:
            share = flops.get(key, 0.0) / operations
            row += f", {share:.0%} of the operations"
            if shares[key] >= CLEAR_SHARE and share >= CLEAR_SHARE:
                return key
        rows.append(row)
    hint = (
        ""
        if flops is not None
        else " (With self.example_input_array set, one that clearly holds the model's parameters"
        " and operations is taken.)"
    )
    raise ValueError(
        f"{type(module).__name__} has several nn.Sequential that could be cut into stages:\n"
        + "\n".join(rows)
        + f"\nName the one to cut:"
        f" GPipeStrategy(backbone={max(shares, key=lambda key: shares[key])!r}), or put them into"
        f" one nn.Sequential.{hint}"
    )


def _checked(module: nn.Module, name: str) -> str:
    try:
        body = module.get_submodule(name)
    except AttributeError:
        found = ", ".join(repr(key) for key, _ in _outermost(module, "")) or "none"
        raise ValueError(
            f"backbone={name!r}: {type(module).__name__} has no such submodule. Its nn.Sequential:"
            f" {found}."
        ) from None
    if not _is_sequential(body):
        raise ValueError(
            f"backbone={name!r} is a {type(body).__name__}, which GPipe can't cut: it must be an"
            " nn.Sequential that keeps nn.Sequential.forward, or lightning_gpipe.Blocks."
        )
    return name


def _outermost(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if _is_sequential(child) and len(list(child.children())) > 1:
            yield name, child
        else:
            yield from _outermost(child, f"{name}.")


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, Blocks) or (
        isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    )


def _advice(module: nn.Module) -> str:
    """How to give a module a backbone."""
    lists = (
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and len(child) > 1
    )
    name = next(lists, None)
    if name is None:
        return (
            "Build the model's body as an nn.Sequential, for example `self.backbone ="
            " nn.Sequential(*blocks)`, and call it in the step."
        )
    return (
        f"Its nn.ModuleList '{name}' may become one: `self.{name} ="
        f" lightning_gpipe.Blocks(self.{name})`, if the model calls its blocks in order and hands"
        " the hidden state from one to the next untouched."
    )


def refuse_compiled(backbone: nn.Module, name: str) -> None:
    """Refuse a backbone that torch.compile calls as one.

    Args:
        backbone: The ``nn.Sequential`` to cut.
        name: Its dotted name.

    Raises:
        ValueError: With what to do instead.
    """
    if backbone._compiled_call_impl is not None or "_orig_mod" in name.split("."):
        raise ValueError(
            f"The backbone '{name}' is compiled as a whole, and can't be cut then: compile its"
            " layers instead, nn.Sequential(*(torch.compile(layer) for layer in layers))."
        )

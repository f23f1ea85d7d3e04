"""Finds the part of a module that is cut into stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from lightning_gpipe.model.blocks import Blocks, loops_over_itself
from lightning_gpipe.model.parameters import parameter_count
from lightning_gpipe.model.redirect import Redirect

#: Share of the parameters, and of the operations where they are known, that singles out one of
#: several candidates.
CLEAR_SHARE = 0.8
#: Share of the parameters that does so where operations aren't known.
_NEARLY_ALL = 0.95


def find_backbone(
    module: nn.Module, name: str | None, flops: Mapping[str, float] | None = None
) -> str:
    """Name the ``nn.Sequential``, or the list of blocks, that becomes the pipeline.

    Args:
        module: The user's module.
        name: Dotted name given by the user; ``None``: take the only :class:`Blocks`; an
            ``nn.ModuleList`` that holds more parameters than any ``nn.Sequential``; the only
            outermost ``nn.Sequential`` of two or more layers, or the one that has the layers of all
            others, or if there is none an ``nn.ModuleDict`` that holds more than half of the
            parameters in modules of one class; the one that is called ``backbone`` and holds more
            than half of the parameters; or the one that holds 80 % of the parameters and of the
            operations, or where these aren't known 95 % of the parameters, if it isn't frozen.
            Frozen copies of another one, such as a teacher's that follows it, don't count.
        flops: Operations of a forward in every submodule by dotted name, if they are known.

    Raises:
        ValueError: If there is no such module, or several, with the candidates and their shares.
    """
    if name is not None:
        return _checked(module, name)
    candidates = _without_copies(_without_parts(dict(_outermost(module, ""))))
    marked = [key for key, body in candidates.items() if isinstance(body, Blocks)]
    if len(marked) == 1:
        return marked[0]
    total = parameter_count([module]) or 1
    shares = {key: parameter_count([body]) / total for key, body in candidates.items()}
    blocks = _without_copies(dict(_lists(module, "")))
    lists = {key: parameter_count([body]) / total for key, body in blocks.items()}
    lists = {k: s for k, s in lists.items() if s > 0.5 or isinstance(blocks[k], nn.ModuleList)}
    largest = max(lists, key=lambda key: lists[key], default=None)
    if largest is not None and lists[largest] > max(shares.values(), default=0.0):
        return largest
    if not candidates and len(named := list(_dicts(module))) == 1:
        return named[0]
    if not candidates:
        raise ValueError(
            f"{type(module).__name__} has no backbone: GPipe needs an nn.Sequential, or an"
            " nn.ModuleList or nn.ModuleDict that the model loops over, of two or more layers to"
            " cut into stages."
            " Build the model's body as one, for example `self.backbone = nn.Sequential(*blocks)`,"
            f" and call it in the step.{_with_own_forward(module)}"
        )
    called = [key for key in candidates if f".{key}".endswith(".backbone") and shares[key] > 0.5]
    if called or len(candidates) == 1:
        return next(iter(called or candidates))
    operations = max((flops or {}).get("", 0.0), 1.0)
    rows = []
    for key in sorted(candidates, key=lambda key: -shares[key]):
        row = f"  {key!r}: {shares[key]:.0%} of the parameters"
        if shares[key] and not _trains(candidates[key]):
            row += ", frozen"
        if flops is not None:
            share = flops.get(key, 0.0) / operations
            row += f", {share:.0%} of the operations"
            if shares[key] >= CLEAR_SHARE and share >= CLEAR_SHARE:
                return key
        elif shares[key] >= _NEARLY_ALL and _trains(candidates[key]):
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
        + f"\n{_recipe(module, list(candidates))}{_otherwise(candidates, shares)}{hint}"
    )


def _with_own_forward(module: nn.Module) -> str:
    """Names sequences that can't be cut as they are."""
    found = [
        repr(name)
        for name, part in module.named_modules()
        if name and isinstance(part, nn.Sequential) and not _is_sequential(part)
    ]
    return (
        f" {found[0]} has a forward of its own, and can be cut if it loops over itself, as in `for"
        f" layer in self`, and holds more than half of the parameters, or is named."
        if found
        else ""
    )


def _without_parts(candidates: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Leave out those all of whose layers another one has, too, and more.

    So it is where a model's parts were put into one sequence, and the model was kept.
    """
    layers = {key: set(body.children()) for key, body in candidates.items()}
    held = {key: set(body.modules()) for key, body in candidates.items()}
    return {
        key: body
        for key, body in candidates.items()
        if not any(layers[key] <= held[k] and not layers[k] <= held[key] for k in held)
    }


def _without_copies(bodies: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Leave out frozen copies of others."""
    looks = {
        key: [(name, p.shape) for name, p in body.named_parameters()]
        for key, body in bodies.items()
    }
    trained = [looks[key] for key, body in bodies.items() if _trains(body)]
    return {k: body for k, body in bodies.items() if _trains(body) or looks[k] not in trained}


def _trains(body: nn.Module) -> bool:
    return any(p.requires_grad for p in body.parameters())


def _otherwise(candidates: Mapping[str, nn.Module], shares: Mapping[str, float]) -> str:
    """How to cut a part of the model all the same."""
    name = max(shares, key=lambda key: (_trains(candidates[key]), shares[key]))
    return (
        f" Or name one nn.Sequential, and the rest runs on every stage:"
        f" GPipeStrategy(backbone={name!r})."
    )


def _recipe(module: nn.Module, candidates: Sequence[str]) -> str:
    """How to make one nn.Sequential of several."""
    parent = _common_parent(candidates)
    place = f"self.{parent}" if parent else "self"
    parts = [
        f"*{place}.{key}"
        if any(name == f"{parent}.{key}".lstrip(".") for name in candidates)
        else f"{place}.{key}"
        for key, child in module.get_submodule(parent).named_children()
        if not isinstance(child, nn.modules.loss._Loss) and not hasattr(child, "compute")  # metrics
    ]
    kept = place if parent else ", ".join(f"self.{key}" for key in candidates)
    names = itertools.chain(("backbone", "body"), (f"body{i}" for i in itertools.count(2)))
    free = next(name for name in names if not hasattr(module, name))  # else it is deleted, too
    return (
        "If they are called one after another, make one nn.Sequential of them and of what is called"
        f" between them, in that order: `self.{free} = nn.Sequential({', '.join(parts)})`, with"
        " nn.Flatten(1) and so on where the forward does more than call its parts, and call it"
        f" instead. Then `del {kept}`: layers that stand under two names are held by every stage."
        " If values pass by some of them, as in a U-Net, let the layers hand tuples on."
    )


def _common_parent(names: Sequence[str]) -> str:
    """The dotted name of the innermost module that holds all."""
    parents = [name.split(".")[:-1] for name in names]
    common = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parents, strict=False))
    return ".".join(level[0] for level in common)


def _checked(module: nn.Module, name: str) -> str:
    try:
        body = module.get_submodule(name)
    except AttributeError:
        raise ValueError(
            f"backbone={name!r}: {type(module).__name__} has no such submodule. {_found(module)}"
        ) from None
    if not _is_sequential(body) and not loops_over_itself(body):
        raise ValueError(
            f"backbone={name!r} is a {type(body).__name__}, which GPipe can't cut: it must be an"
            " nn.Sequential that keeps nn.Sequential.forward, or whose own one loops over it, an"
            " nn.ModuleList or nn.ModuleDict that the model loops over, or lightning_gpipe.Blocks."
            f" {_found(module)}"
        )
    if not body._modules:
        raise ValueError(f"backbone={name!r} has no layers: name one that has some.")
    return name


def _found(module: nn.Module) -> str:
    """What could be named in place of a wrong name."""
    found = [
        f"Its {kind}: {', '.join(map(repr, names))}."
        for kind, bodies in (
            ("nn.Sequential", _outermost(module, "")),
            ("nn.ModuleList", _lists(module, "")),
            ("nn.ModuleDict", ((name, module) for name in _dicts(module))),
        )
        if (names := [key for key, _ in bodies])
    ]
    return " ".join(found) or "It has neither an nn.Sequential nor an nn.ModuleList of two or more."


def _outermost(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if _is_sequential(child) and len(child._modules) > 1:
            yield name, child
        elif isinstance(child, nn.ModuleList) and len(child) > 1:
            continue  # what is in its entries is a part of a block
        else:
            yield from _outermost(child, f"{name}.")


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, Blocks) or (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and ("forward" not in vars(module) or isinstance(vars(module)["forward"], Redirect))
    )


def _lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists of blocks that may become :class:`Blocks`."""
    for key, child in module.named_children():
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and loops_over_itself(child)
        if is_list and not isinstance(child, Blocks) and len(child._modules) > 1:
            yield f"{prefix}{key}", child
        else:
            yield from _lists(child, f"{prefix}{key}.")


def _dicts(module: nn.Module) -> Iterator[str]:
    """The ``nn.ModuleDict`` that hold most of the parameters in modules of one class."""
    total = parameter_count([module])
    for name, part in module.named_modules():
        is_of_one = len({type(child) for child in part.children()}) == 1
        is_one = type(part) is nn.ModuleDict and len(part) > 1 and is_of_one
        if is_one and parameter_count([part]) > total / 2:
            yield name


#: What a Trainer calls, and what these call.
_CALLED = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def refuse_compiled(module: nn.Module, backbone: str) -> None:
    """Refuse what torch.compile calls as one together with the backbone, and what torch.jit made.

    Args:
        module: The user's module.
        backbone: Dotted name of the ``nn.Sequential`` to cut.

    Raises:
        ValueError: With what to do instead.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):  # nobody can put other tensors there
            raise ValueError(
                f"'{name}' is made by torch.jit, so it can't be shared out among stages: use the"
                " module as it was before torch.jit.script or torch.jit.trace. To make it faster,"
                " use torch.compile."
            )
    keys = backbone.split(".")
    for end in range(len(keys) + 1):
        name = ".".join(keys[:end])
        part = module.get_submodule(name)
        if not is_compiled(part):
            continue
        what = f"'{name.removesuffix('._orig_mod')}'" if name else type(part).__name__
        raise ValueError(
            f"The backbone '{backbone}' can't be cut, because {what} is compiled as a whole:"
            " compile its layers instead, nn.Sequential(*(torch.compile(layer) for layer in"
            " layers)), or Blocks of them."
        )


def is_compiled(part: nn.Module) -> bool:
    """Whether torch.compile has taken over a module's call, or a step of it."""
    return (
        part._compiled_call_impl is not None
        or isinstance(getattr(part, "_orig_mod", None), nn.Module)
        or getattr(part, "_compiler_ctx", None) is not None  # Lightning's trainer.fit(compiled)
        or any(hasattr(getattr(part, name, None), "_torchdynamo_orig_callable") for name in _CALLED)
    )

"""The messages for calls whose micro-batches, put together, do not give the model's output."""

from __future__ import annotations

import cmath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.ir.source import model_frame
from fxpipe.loss_weight import IGNORED
from fxpipe.meaning.candidates import different_sizes
from fxpipe.meaning.check import Verdict
from fxpipe.meaning.compare import Difference
from fxpipe.meaning.problem import Problem
from fxpipe.meaning.said import INFER, Input, of_no_tensors
from fxpipe.meaning.values_read import DifferingValue
from fxpipe.runtime.microbatch import LISTED, InDim
from fxpipe.trace.errors import source_line


def sizes(inputs: Sequence[Input]) -> dict[int, Input]:
    """The sizes of the first dimensions of inputs that ``in_dims`` does not mention, each with the
    first input of that size."""
    rows: dict[int, Input] = {}
    for each in inputs:
        if each.said is INFER and each.tensor.ndim and each.tensor.shape[0] != 1:
            rows.setdefault(each.tensor.shape[0], each)
    return rows


def several(rows: dict[int, Input], advice: str) -> str:
    """The message for inputs whose first dimensions have different sizes, where the model does not
    run if the inputs are cut along any of them."""
    return different_sizes(rows, ", and the model takes no other size of either") + advice


def advice_on(model: nn.Module, arguments: Mapping[str, Any], inputs: Sequence[Input]) -> str:
    """Advice on arguments that are not cut as they are: lists of tensors, of which each may be a
    row; lists of numbers or strings; and ids in one dimension for bags of different sizes. It comes
    behind a message; "" if there is nothing of the kind."""
    found = [_on_lists(inputs), _on_constants(arguments), _on_bags(model, inputs)]
    return "".join(f"; {each}" for each in found if each)


def _on_lists(inputs: Sequence[Input]) -> str:
    unsaid = (each.name for each in inputs if each.said is INFER and "[" in each.name)
    name = next(unsaid, "").split("[")[0]
    if not name:
        return ""
    return (
        f'if {name} has one element for each row, in_dims={{"{name}": "list"}} has it cut '
        "between its elements, and says what differs if that is not the model's output either"
    )


def _on_constants(arguments: Mapping[str, Any]) -> str:
    for name, value in arguments.items():
        if found := of_no_tensors(value):
            how = f", torch.tensor({name})" if "numbers" in found else ""
            return (
                f"{name} is {found}, which has no batch dimension, so that each micro-batch gets "
                f"all of it: if it has one element for each row, give it as a tensor{how}"
            )
    return ""


def _on_bags(model: nn.Module, inputs: Sequence[Input]) -> str:
    has_bags = any(isinstance(module, nn.EmbeddingBag) for module in model.modules())
    tensors = [each.tensor for each in inputs if isinstance(each.tensor, Tensor)]
    flat = [each for each in tensors if each.dim() == 1 and not each.is_floating_point()]
    if not has_bags or len(flat) < 2:
        return ""
    return (
        "if these are ids in one dimension and the offsets of bags for nn.EmbeddingBag, give ids "
        "of two dimensions and no offsets, with a row for each bag, and fill short rows up with "
        "its padding_idx="
    )


def split(inputs: Sequence[Input], dims: Sequence[InDim]) -> str:
    """The dimensions along which inputs are cut, as text."""
    said = [
        f"{each.name} along dimension {dim}"
        if isinstance(each.tensor, Tensor) and dim != LISTED
        else f"{each.name} along the list"
        for each, dim in zip(inputs, dims, strict=True)
        if dim is not None
    ]
    return ", ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")


def other_dims(inputs: Sequence[Input], dims: Sequence[int | None]) -> str:
    """The line of the report that says which dimensions are the batch's, where these are not the
    first ones of all inputs."""
    shared = [each.name for each, d in zip(inputs, dims, strict=True) if d is None]
    more = f"; all micro-batches share {', '.join(shared[:5])}" if shared else ""
    return f"the batch is found by the check: {split(inputs, dims)}{more}"


def shared_draws(
    inputs: Sequence[Input], dims: Sequence[InDim], draws: Mapping[int, fx.Node]
) -> str:
    """The warning for random numbers that each micro-batch draws anew for inputs that it shares.

    Args:
        draws: by the place of such an input, the first node that draws some for it.
    """
    shared = [inputs[place] for place in sorted(draws)]
    node = next(iter(draws.values()))
    frame = model_frame(node.meta.get("stack_trace"))
    where = f"in {node.name!r}"
    if frame is not None:
        where = f"at {source_line(frame['file'], int(frame['number']))}"
    names = " and ".join(each.name for each in shared)
    return (
        f"the model draws random numbers for what it computes of {' and '.join(map(str, shared))} "
        f"alone ({where}), and all micro-batches share {names}, with as many rows as the batch "
        f"({split(inputs, dims)}): each micro-batch draws its own for all of {names}, as a loop "
        "over micro-batches does, and the model on the whole batch draws them once. If rows of "
        f"{names} are a batch as well, as in a model that returns image_features @ "
        "text_features.T, return the features of both from the model, and compute what combines "
        "them, and the loss, from what the pipeline returns; or, if no random numbers are drawn "
        f"for the inputs that are cut, give in_dims with the batch dimension of {names}, to have "
        f"that cut in place of them. To have it as it is, give in_dims with None for {names}; or "
        "give chunks=1"
    )


def one_microbatch(rows: int, notes: Sequence[str]) -> str:
    """The warning for a mini-batch that is not cut. ``notes``: what the check has remarked on."""
    why = next((f" ({note})" for note in notes if note.startswith("the batch is found")), "")
    return (
        f"a mini-batch of {rows} rows is one micro-batch, although more were asked for: it cannot "
        f"be cut into parts that the model takes, of equal size where it makes its batch size a "
        f"constant{why}. If the batch is along other dimensions, give in_dims; to have it so, give "
        "chunks=1"
    )


def wrong(
    verdict: Verdict,
    inputs: Sequence[Input],
    dims: Sequence[int | None],
    advice: str,
    packed: str,
) -> str:
    """The message for a model whose outputs no way of cutting the inputs gives. ``packed``: advice
    on rows that belong together, at the end."""
    problem = next(p for p in verdict.problems if not p.is_scalar)
    if problem.is_list_of_rows:
        return f"{problem.text}: {_as_lists(inputs, dims)}"
    remedy = (
        "; no other dimensions that were tried give the model's output either. If the batch is "
        "along others, give in_dims, with None for an input that all micro-batches share; or "
        "compute what mixes rows outside of the model; or give chunks=1. A difference that does "
        'no harm is accepted with check="warn"'
    )
    if problem.remedy:
        remedy = f": {problem.remedy}"
    return (
        f"{problem.text}{advice}. This is so with {split(inputs, dims)} cut into micro-batches"
        f"{remedy}{packed}"
    )


def _as_lists(inputs: Sequence[Input], dims: Sequence[int | None]) -> str:
    """What to do about an output that is a list of rows."""
    names = [each.name for each, dim in zip(inputs, dims, strict=True) if dim is not None]
    said = ", ".join(f'"{name}": "list"' for name in names)
    in_dims = f"in_dims={{{said}}}" if all(map(str.isidentifier, names)) else 'in_dims with "list"'
    return (
        f"give {' and '.join(f'list({name})' for name in names)}, with one element for each row, "
        f"to a model that takes lists (by torch.stack({names[0]}), say), and {in_dims}; or return "
        "tensors whose first dimension is the batch; or give chunks=1"
    )


def blamed_on_buffers(problem: Problem, buffers: Mapping[str, str]) -> Problem:
    """A problem of rows that are mixed by way of buffers, which says so.

    Args:
        buffers: by the name of each buffer, the line that writes to it; "" if that is unknown.
    """
    said = [name + (f" (at {line})" if line else "") for name, line in buffers.items()]
    names = " and ".join(buffers)
    return replace(
        problem,
        text=f"{problem.text}: the forward writes to {' and '.join(said)} what it computes of all "
        f"rows, and then computes with it, and each micro-batch does so with its own rows",
        remedy=f"compute with the values that {names} had ahead of the call, and write to it "
        "outside of the model, once for each mini-batch, from what the pipeline returns; or give "
        'chunks=1. A difference that does no harm is accepted with check="warn"',
    )


def no_parts(
    verdict: Verdict,
    inputs: Sequence[Input],
    dims: Sequence[int | None],
    arguments: Mapping[str, Any],
    advice: str,
) -> str:
    """The message for a model that takes the whole batch, but no part of it. ``arguments``: all
    that it is called with, by name."""
    error = verdict.failure
    first = next(iter(str(error).strip().splitlines()), "")
    return (
        f"the model does not take a part of the batch, cut {split(inputs, dims)}: "
        f"{type(error).__name__}: {first}. Give in_dims, with the batch "
        "dimension of each input, or None for one that all micro-batches share; or chunks=1"
        f"{_on_a_count(arguments, inputs, first)}{advice}"
    )


def _on_a_count(arguments: Mapping[str, Any], inputs: Sequence[Input], error: str) -> str:
    """Advice on an argument that is an integer which the error names: it may count the rows of the
    batch, of which a part has fewer. "" if there is none."""
    named = set(map(int, re.findall(r"\d+", error)))
    for name, value in arguments.items():
        if type(value) is int and value > 1 and value in named:
            return (
                f"; {name} is {value} for each micro-batch as well: if it is a number of rows, "
                "which is smaller there, leave it out, and let the forward take it from the shape "
                f"of an input, as {inputs[0].name}.shape[0]"
            )
    return ""


def in_the_backward(problem: Problem) -> str:
    """The message where the gradients of the parts do not add up to those of the whole."""
    return (
        f"{problem.text}: a backward that is not the derivative of its forward (of a "
        "torch.autograd.Function, of what is detached, changed by a hook, or of an embedding with "
        "scale_grad_by_freq=True) puts rows together. Move it out of the "
        "model, or give chunks=1; a difference that does no harm is accepted with "
        'check="warn"'
    )


def unrepeatable(path: str, apart: Difference) -> str:
    """The message for a model that gives another output for the same inputs at each call."""
    return (
        f"{path} differs by {apart} between two calls with the same inputs: the model counts its "
        "calls where fxpipe does not see it (in a list, a dict or an object outside of its "
        "modules), or draws random numbers other than PyTorch's. A graph would have the values of "
        "one call for ever: keep such a state in a buffer of the model or in an attribute of a "
        "module within it, and draw random numbers with torch"
    )


def not_stilled(paths: Sequence[str]) -> str:
    """The message for outputs that cannot be compared, since they depend on random numbers which
    differ between the runs of the check."""
    return (
        f"{' and '.join(paths)} cannot be compared with what micro-batches give: it depends on "
        "random numbers that the check does not know how to hold still, such as those of an "
        "operator of your own, or of a function that has been imported from numpy.random or random "
        "by its own name. Draw them with torch, or by numpy.random.rand(...), say, in place of "
        'rand(...); or give check="warn", with which nothing tells whether rows depend on each '
        "other, nor whether a number is a mean or a sum, and in_dims and out_dims, which say it"
    )


def lasting(text: str) -> str:
    """The warning for a state that is another one after micro-batches than after all rows."""
    return (
        f"{text}. Gradient accumulation does the same. To have the model's own, change that state "
        "outside of the forward, once for each mini-batch, from what the pipeline returns; or give "
        "chunks=1"
    )


def by_size(
    problem: Problem, sizes: Sequence[int], inputs: Sequence[Input], dims: Sequence[InDim]
) -> str:
    """The message for a model that is right in parts of a few rows, and not in micro-batches."""
    return (
        f"{problem.text}. This is so with {split(inputs, dims)} cut into micro-batches. For fewer "
        "rows the parts make the whole: the model does something else "
        f"with {sum(sizes)} rows than with {' and '.join(map(str, sorted(set(sizes))))}, so that a "
        "branch of it depends on the batch size, or it leaves out rows behind a number of them, as "
        "x[:n] does. Take that out of the model, or let it depend on an argument; if the batch is "
        "along other dimensions, give in_dims; or give chunks=1"
    )


def at_a_size(problem: Problem, size: int) -> str:
    """The warning for a number, such as a loss, that is no mean for micro-batches of a size."""
    return (
        f"{problem.text}. For some other numbers of rows it is, but a mini-batch has come that is "
        f"cut into micro-batches of {size} rows, for which it is not: give mini-batches whose "
        "micro-batches have as many rows as the loss takes together (an even number, for pairs); "
        "DataLoader(drop_last=True) leaves out a last one that is smaller"
    )


def by_values(verdict: Verdict, read: DifferingValue) -> str:
    """The message for a model that reads a value of its inputs as a number, which is another one
    for a part of the batch than for all of it."""
    trial, problem = verdict.trial, verdict.problems[0]
    assert trial is not None
    rows, parts = sum(trial.sizes), " and ".join(map(str, trial.sizes))
    accepted = (
        ""
        if problem.difference is None
        else ('. A difference that does no harm is accepted with check="warn"')
    )
    remedy = problem.remedy or (
        "compute it from the whole batch ahead of the call, and give it to the model as an "
        "argument, a Python number (where it is a size, the inputs may also be cut to it there, "
        "and not in the model); or give chunks=1"
    )
    return (
        f"{problem.path} depends on a number that the model reads from the values of "
        f"{' and '.join(read.inputs)} (at {read.where}): for {rows} rows made from those of the "
        f"example it is {read.whole}, and {' and '.join(map(str, read.parts))} for {parts} of "
        f"them, so that micro-batches would compute something else: {remedy}" + accepted
    )


def unclear(path: str) -> str:
    """The message for an output that may be a mean or a sum."""
    return (
        f"{path} has no dimension of rows, and it was zero whatever the rows of a sample were, so "
        "that it cannot be found out whether it is a mean over the rows or a sum: give out_dims, "
        'with None for a mean or "sum" for a sum (of a loss that the model returns, '
        'loss_weight="rows" or "sum"), or example inputs for which it is not zero'
    )


def needed_whole(names: Sequence[str], rows: int, is_taken: bool = True) -> str:
    """The message for tensors of a target that have as many elements as the batch has rows, and of
    which each micro-batch needs all. ``names``: what to write for them. ``is_taken``: whether the
    loss takes their parts, although these make another loss."""
    has, is_cut, them = ("has", "it is", "it") if len(names) == 1 else ("have", "they are", "them")
    needs = "the losses of micro-batches make that of the whole batch only if each of them is given"
    if not is_taken:
        needs = "loss_fn takes a micro-batch only if it is given"
    return (
        f"{' and '.join(names)} {has} {rows} elements along the first dimension, as many as the "
        f"batch has rows, so that {is_cut} cut into micro-batches as rows are; but {needs} all of "
        f"{them}, as of a weight for each class. What all rows share is the loss function's, and "
        f"no part of the target: give {them} as an attribute of loss_fn, or as an argument by "
        "functools.partial(loss_fn, weight=weight)"
    )


def along_another(names: Sequence[str], dim: int, what: str) -> str:
    """The message for tensors of a target that have the batch along another dimension than the
    first, as ``what`` has it. ``names``: what to write for them."""
    said = "the target" if list(names) == ["target"] else " and ".join(names)
    is_cut, first = ("is cut", "its") if len(names) == 1 else ("are cut", "their")
    them = "it" if len(names) == 1 else "them"
    return (
        f"{said} {is_cut} into micro-batches along {first} first dimension, as all targets are, "
        f"and {what} along dimension {dim}; but the losses of micro-batches make that of the "
        f"whole batch only if both are cut along dimension {dim}: give {them} transposed, by "
        f"{names[0]}.transpose(0, {dim}), and let loss_fn take {them} so"
    )


def not_finite(verdict: Verdict) -> str:
    """The loss of the last sample, as text, if it is NaN or infinite; else ""."""
    found = [] if verdict.trial is None else list(verdict.trial.whole.values())
    numbers = [each.item() for each in found if isinstance(each, Tensor) and each.numel() == 1]
    return next((str(each) for each in numbers if not cmath.isfinite(each)), "")


def unknown_loss(verdict: Verdict, cut: Mapping[int, str]) -> str:
    """The message for a ``loss_fn`` where the check cannot tell a mean from a sum. ``cut``: what to
    write for the tensors of the target that are cut into micro-batches."""
    why = "its values on rows like those of the example are the same either way (zero, say)"
    if endless := not_finite(verdict):
        why = (
            f"it is {endless} for rows like those of the example (is any value of the inputs, the "
            "parameters or the target NaN or infinite?)"
        )
    if verdict.failure is not None:
        first = str(verdict.failure).strip().splitlines()[:1]
        why = "on other numbers of rows it, or the model, raises "
        why += f"{type(verdict.failure).__name__}: {first[0].rstrip('.') if first else ''}"
    of_all = ""
    if isinstance(verdict.failure, IndexError):
        of_all = (
            ". Where the target numbers the rows of the mini-batch, as torch.arange does for a "
            "contrastive loss, the loss compares all rows with each other, and none of these is "
            "right: compute it of the outputs of all, loss_fn(pipe(...), target).backward()"
        )
    return (
        f"whether loss_fn is a mean over the rows or a sum could not be found out: {why}. Give "
        'loss_weight="rows" if it is a mean over the rows, loss_weight="sum" if it is a sum, or a '
        "function of the target that says by how much each micro-batch counts"
        f"{of_all}{_as_rows(cut)}"
    )


def _as_rows(cut: Mapping[int, str]) -> str:
    """What to say of several tensors of a target, all of which are cut into micro-batches."""
    if len(cut) < 2:
        return ""
    return (
        f". Of the target, {' and '.join(cut.values())} are cut into micro-batches as rows, "
        "because their first dimensions are as large as the batch: if one of them has no row for "
        "each row of the batch, such as a weight for each class, it is the loss function's: an "
        "attribute, or an argument by functools.partial(loss_fn, weight=weight)"
    )


def another_each_time() -> str:
    """The warning for a ``loss_fn`` that cannot be compared with itself."""
    return (
        "loss_fn gives another number each time it is called with the same rows, since it draws "
        "random numbers, or counts its calls, say. So it cannot be checked whether the losses of "
        "micro-batches make that of the whole batch; they are averaged over the rows. Give "
        'loss_weight="rows" if the loss is a mean over the rows, "sum" if it is a sum, or a '
        "function of the target that says by how much each micro-batch counts"
    )


def another_after_calls() -> str:
    """The warning for a ``loss_fn`` whose value depends on the calls ahead of it."""
    return (
        "loss_fn gives another number each time it is called with the same rows, since it counts "
        "its calls, or keeps a mean of outputs, say, and computes with that. Each micro-batch is a "
        "call, so that the loss of a mini-batch is not that of one call with all of its rows. "
        "Accumulating gradients over micro-batches by hand does the same. Change that state "
        "outside of loss_fn, once for each mini-batch; or give "
        'loss_weight="rows" if it is as you want it'
    )


def reads_what_the_forward_sets(model: nn.Module, paths: Sequence[str]) -> str:
    """The message for a ``loss_fn`` that reads attributes which the forward of the model sets."""
    kind, names = type(model).__name__, " and ".join(paths)
    is_are = "is" if len(paths) == 1 else "are"
    return (
        f"loss_fn reads {names}, which {kind} sets in its forward: in a step {names} {is_are} what "
        "it was before, or that of another micro-batch. Let the forward return it beside its "
        "output, and let loss_fn take it from there"
    )


def reads_what_is_left(left: Sequence[tuple[str, str]]) -> str:
    """The message for a ``loss_fn`` that reads what hooks, or parts of the model that are called as
    they are, leave in Python objects: these in words, each with the part."""
    read = ", and ".join(f"{what}, which {by} changes while the model runs" for what, by in left)
    return (
        f"loss_fn reads {read}: in a step the stages run at the same time as loss_fn, which finds "
        "there what is of another micro-batch. Let the forward of the model, or of a module around "
        "it, return what loss_fn needs beside the output, and let loss_fn take it from there"
    )


def shares_state(model: nn.Module, names: Sequence[str]) -> str:
    """The message for a ``loss_fn`` that shares buffers with stages, of which one or the other
    writes to them."""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"loss_fn and the forward of {type(model).__name__} both use {listed}, and one of them "
        "writes to it: in a step stages run at the same time as loss_fn, so that the updates come "
        "in another order than in a loop over the micro-batches. Let the forward call the module "
        "for loss_fn, too, and return the result beside its output; or cut the model so that this "
        "module is in the last stage, after which loss_fn runs (partition=)"
    )


def in_the_gradient_of_the_loss(apart: Difference, sizes: Sequence[int]) -> str:
    """The warning for a ``loss_fn`` whose value is put together as it is to be, and whose gradient
    is not. ``sizes``: those of the parts of the sample."""
    return (
        "the losses of micro-batches make that of the whole batch, but their gradients do not make "
        f"its gradient: with respect to the output, that of {sum(sizes)} rows differs by {apart} "
        f"from those of {' and '.join(map(str, sizes))} of them. In loss_fn the gradient of a row "
        "depends on other rows: on a number of all rows that it detaches (or computes under "
        "torch.no_grad()), by a hook, or by a torch.autograd.Function of its own. A step computes "
        "it of the rows of each micro-batch, as gradient accumulation does. To get the gradient of "
        "the whole batch, call loss_fn(pipe(x), target) and its backward in place of a "
        "step; or give chunks=1; or have loss_fn compute that of each row alone, or take a number "
        "that does not depend on the batch"
    )


def put_together_from_now_on(path: str, was_sum: bool) -> str:
    """The warning for a mean over the rows that has become a sum, or the other way round."""
    before, now = ("sum", "mean") if was_sum else ("mean", "sum")
    word = "rows" if was_sum else "sum"
    return (
        f"{path} is a {now} over the rows by now, as a check with this mini-batch says, and was "
        f"put together as a {before} over them before: from this call on it is put together as a "
        f"{now}. If it is the loss, and one in every step, give loss_weight={word!r}, which says so"
    )


def across(
    problem: Problem,
    inputs: Sequence[Input],
    remedy: str = "",
    *,
    of_loss_fn: bool = False,
    has_sum: bool = False,
    has_number: bool = False,
    has_means: bool = False,
    may_be_weighted: bool = True,
    calls_are_trained: bool = True,
    cut: Mapping[int, str] | None = None,
) -> str:
    """The warning for a number, such as a loss, that differs from the model's on the mini-batch.

    Args:
        remedy: the ``loss_weight`` that makes it equal to the model's, as code that the user can
            write, or "" if none is known.
        of_loss_fn: whether it is the result of ``loss_fn``, and not of the model.
        has_sum: whether it is a mean over the rows plus a sum over them.
        has_number: whether that mean is a number that is the same for all rows.
        has_means: whether it may be made of several means.
        may_be_weighted: whether it may be a mean to which rows contribute unequally.
        calls_are_trained: whether ``pipe(x)`` has a backward of its own, as it has not on ranks.
        cut: as for :func:`unknown_loss`; None: nothing.
    """
    what = f"{problem.text}, which is what a pipeline gives, as gradient accumulation does."
    instead = "compute it outside of the model, from the whole output of the pipeline"
    if of_loss_fn:
        instead = "call loss_fn(pipe(x), target) and its backward in place of a step"
    otherwise = f"{instead}, or give chunks=1" if calls_are_trained else "give chunks=1"
    if remedy:
        return (
            f"{what} It is a mean to which rows contribute unequally: with loss_weight={remedy} it "
            f"is the {'whole batch' if of_loss_fn else 'model'}'s; or {otherwise}"
        )
    if has_number and of_loss_fn:
        return (
            f"{what} It is a sum over the rows plus a number that is the same whatever rows there "
            'are (a penalty on weights, say): give loss_weight="sum", and multiply that number by '
            "the part of the batch's rows that the micro-batch has, len(target) / batch; or "
            f"{otherwise}"
        )
    if has_sum:
        return (
            f"{what} It is a mean over the rows plus a sum over them: divide that sum by the "
            "number of rows, so that all of it is a mean; or, to keep the sum, give "
            'loss_weight="sum", and multiply what is no sum (a penalty on weights, say) by the '
            "part of the batch's rows that the micro-batch has, len(target) / batch; or "
            f"{otherwise}"
        )
    several = (
        ". If it adds up means over different things, such as rows and tokens, put the counts of "
        "the whole batch into the target, as tensors without dimensions, divide sums by them, and "
        'give loss_weight="sum"'
    )
    several = several if has_means else ""
    if of_loss_fn and not may_be_weighted:
        return (
            f"{what} No mean of the losses of micro-batches is that of the whole batch: to get it, "
            f"{otherwise}{several}{_as_rows(cut or {})}"
        )
    masked = [
        each.name
        for each in inputs
        if isinstance(each.tensor, Tensor)
        and not each.tensor.is_floating_point()
        and not each.tensor.is_meta
        and each.tensor.dtype.is_signed
        and bool((each.tensor == IGNORED).any())
    ]
    why = ""
    if masked:
        why = (
            f" If labels of {IGNORED} in {masked[0]} are left out of a mean, micro-batches with "
            "few other labels count for too much."
        )
    if of_loss_fn:
        return (
            f"{what}{why} To get that of the whole batch:\n"
            "  - of a mean by lengths or a mask, put these into the target, and count them: "
            "target=(y, lengths) and loss_weight=lambda target: target[1].sum()\n"
            "  - of another weighted mean, give loss_weight=, a function of the target that says "
            "by how much each micro-batch counts\n"
            f"  - of any other loss, a root of a mean say, {otherwise}{several}"
            f"{_as_rows(cut or {})}"
        )
    return f"{what}{why} To get the model's number, {otherwise}"

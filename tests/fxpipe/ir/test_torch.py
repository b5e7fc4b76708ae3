"""What is private to PyTorch, each name with what is relied on, and what would make it needless.

Where a test fails that a name ``does not exist in public``, PyTorch has got a public name for it:
once the oldest release that fxpipe supports has it too, the private one can go.
"""

import dataclasses
import importlib.util
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpipe.ir import _torch


def does_not_exist_in_public(owner, *names):
    return not any(hasattr(owner, name) for name in names)


# ---------------------------------------------------------------------------- values and operators


def test_pytree_is_the_registry_that_export_uses():
    class Pair:
        def __init__(self, *parts):
            self.parts = parts

    _torch.pytree.register_pytree_node(
        Pair,
        lambda pair: (list(pair.parts), None),
        lambda parts, _: Pair(*parts),
        serialized_type_name="tests.Pair",
    )
    leaves, spec = _torch.pytree.tree_flatten({"a": Pair(1, 2)})
    assert leaves == [1, 2]
    assert _torch.pytree.tree_unflatten([3, 4], spec)["a"].parts == (3, 4)
    assert importlib.util.find_spec("torch.utils.pytree") is None


def test_fake_tensors_have_shapes_and_no_values():
    with _torch.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3))
        assert isinstance(fake, _torch.FakeTensor) and fake.fake_mode is mode
        assert (fake + 1).shape == (3,)
        with pytest.raises(_torch.DataDependentOutputException):
            fake.sum().item()
        with pytest.raises(_torch.DynamicOutputShapeException):
            fake.nonzero()
    assert does_not_exist_in_public(torch, "FakeTensor", "FakeTensorMode")


def test_an_export_works_on_fake_or_functional_tensors():
    seen = []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append(type(x))
            return x + 1

    torch.export.export(Looks(), (torch.ones(2),))
    assert seen and all(issubclass(t, _torch.FakeTensor | _torch.FunctionalTensor) for t in seen)


def test_a_tensor_tells_of_its_history_and_memory_by_three_methods_and_two_properties():
    """If a model can ask for these in public, ``IS_VIEW``, ``IS_ZERO``, ``TYPED_STORAGE``,
    ``VERSION`` and ``BASE`` go."""
    part = (x := torch.ones(2))[:1]
    part += 1
    assert getattr(part, _torch.IS_VIEW)() and not getattr(x, _torch.IS_VIEW)()
    assert getattr(part, _torch.BASE) is x and getattr(x, _torch.VERSION) == 1
    assert not getattr(x, _torch.IS_ZERO)() and len(getattr(x, _torch.TYPED_STORAGE)()) == 2
    assert does_not_exist_in_public(torch.Tensor, "is_view", "version", "base", "is_zerotensor")
    assert does_not_exist_in_public(torch.Tensor, "typed_storage")


def test_a_dispatch_mode_sees_operators_which_are_overloads_with_a_schema():
    seen = []

    class Sees(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Sees():
        torch.ones(2).add_(1)
        with _torch.disable_current_modes():
            torch.ones(2).mul_(2)
    add = seen[-1]
    assert isinstance(add, _torch.OpOverload) and str(add) == "aten.add_.Tensor"
    schema = _torch.schema_of(add)
    assert schema.is_mutable and schema.arguments[0].alias_info.is_write
    assert schema.arguments[1].alias_info is None
    assert _torch.schema_of(torch.add) is None
    assert does_not_exist_in_public(_torch.OpOverload, "schema")


def test_an_operator_that_is_written_in_python_is_known_with_its_function():
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    torch.library.custom_op("fxpipe_tests::double", double, mutates_args=())
    assert _torch.function_of_operator(torch.ops.fxpipe_tests.double.default) is double
    assert _torch.function_of_operator(torch.ops.aten.add.Tensor) is None


def test_kernels_in_python_run_where_those_in_c_need_values():
    with _torch.enable_python_dispatcher():
        assert torch.ones(2).add(1).tolist() == [2, 2]


def test_an_alias_that_is_made_below_autograd_counts_writes_with_the_tensor():
    class Aliases(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            self.made = result.detach(), _torch.alias_below_autograd(result)
            return result

    with Aliases() as mode:
        written = torch.zeros(2) + torch.zeros(2, requires_grad=True)
    written.add_(1)
    apart, alias = mode.made
    assert [each.tolist() for each in mode.made] == [[1, 1]] * 2
    assert not alias.requires_grad and _torch.version_of(alias) == 1
    assert _torch.version_of(apart) == 0, "detach() is enough: alias_below_autograd can go"


def test_the_version_of_a_tensor_counts_writes_also_those_through_views():
    tensor = torch.zeros(2)
    before = _torch.version_of(tensor)
    tensor[0].add_(1)
    assert _torch.version_of(tensor) == before + 1
    assert does_not_exist_in_public(torch.Tensor, "version")
    assert not hasattr(torch.autograd.graph, "version_of")
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version counter"):
        _torch.version_of(torch.zeros(2))


def test_a_view_is_known_from_what_is_none():
    tensor = torch.zeros(2)
    assert _torch.is_view(tensor[:1]) and not _torch.is_view(tensor)
    assert does_not_exist_in_public(torch.Tensor, "is_view")


def test_views_have_their_tensors_memory_also_fake_ones_where_no_address_tells():
    with _torch.FakeTensorMode():
        one, other = torch.zeros(2), torch.zeros(2)
        assert _torch.memory_number(one) == _torch.memory_number(one[1:])
        assert _torch.memory_number(one) != _torch.memory_number(other)
    assert does_not_exist_in_public(torch.UntypedStorage, "cdata", "id")


def test_the_stored_values_of_a_sparse_tensor_are_counted_before_they_are_coalesced():
    twice = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    assert _torch.stored_values(twice) == 2
    with pytest.raises(RuntimeError, match="uncoalesced"):
        twice.values()
    assert does_not_exist_in_public(torch.Tensor, "nnz")


# ------------------------------------------------------------- what is active in the running thread


def test_function_modes_of_the_running_thread_are_told_and_exchanged():
    assert _torch.function_modes() == ()
    with torch.device("meta"):
        modes = _torch.function_modes()
        assert [type(mode) for mode in modes] == [_torch.DeviceContext]
        _torch.exchange_function_modes(())
        assert torch.ones(1).device.type == "cpu"
        _torch.exchange_function_modes(modes)
        assert torch.ones(1).device.type == "meta"
    assert does_not_exist_in_public(torch.overrides, "get_current_function_mode_stack")


def test_dispatch_modes_of_the_running_thread_are_noticed():
    assert not _torch.has_dispatch_modes()
    with _torch.FakeTensorMode():
        assert _torch.has_dispatch_modes()
    names = "get_dispatch_modes", "has_dispatch_modes"
    assert does_not_exist_in_public(torch.overrides, *names)


def test_modes_of_all_kinds_transforms_and_dual_levels_are_noticed_at_once():
    assert not _torch.is_intercepting()
    contexts = torch.device("meta"), _torch.FakeTensorMode(), torch.autograd.forward_ad.dual_level()
    for context in contexts:
        with context:
            assert _torch.is_intercepting()
    seen = []
    torch.func.vmap(lambda x: seen.append(_torch.is_intercepting()) or x)(torch.ones(2))
    assert seen == [True] and not _torch.is_intercepting()


def test_whether_functions_ask_subclasses_is_switched_off_and_on_again():
    assert _torch.asks_torch_function()
    with _torch.DisableTorchFunction():
        assert not _torch.asks_torch_function()
        with _torch.EnableTorchFunction():
            assert _torch.asks_torch_function()
        assert not _torch.asks_torch_function()


def test_forward_mode_is_noticed():
    assert not _torch.is_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert _torch.is_forward_mode()
    assert does_not_exist_in_public(torch.autograd.forward_ad, "current_level", "is_enabled")


def test_backwards_that_share_what_checkpoints_recompute_are_noticed():
    group = getattr(torch.utils.checkpoint, "GraphExecGroup", None)
    assert not _torch.is_in_a_group()
    if group is not None:  # PyTorch 2.11 may not have it
        with group():
            assert _torch.is_in_a_group()


def test_the_generator_is_the_one_that_a_checkpoint_calls(monkeypatch):
    """When PyTorch 2.15 is the oldest, the settings always come by name."""
    name, is_by_name = _torch.non_reentrant_generator()
    original, called = getattr(torch.utils.checkpoint, name), []

    def noted(*args, **kwargs):
        called.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.utils.checkpoint, name, noted)
    torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(2), use_reentrant=False)
    assert len(called) == 1
    assert ("preserve_rng_state" in called[0]) == is_by_name


def test_functional_transforms_are_told_from_the_outermost_to_the_innermost():
    seen = []
    torch.func.grad(torch.func.vmap(lambda x: seen.append(_torch.transforms()) or x))
    torch.func.grad(
        lambda x: torch.func.vmap(lambda y: seen.append(_torch.transforms()) or y)(x).sum()
    )(torch.ones(2))
    assert seen == [[_torch.TransformType.Grad, _torch.TransformType.Vmap]]
    assert _torch.transforms() == []


def test_hooks_on_saved_tensors_can_be_taken_away_and_put_back():
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    x = torch.ones(2, requires_grad=True)
    assert _torch.saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hooks = _torch.saved_tensors_hooks()
        assert hooks[0] is pack
        _torch.pop_saved_tensors_hooks()
        x.exp()
        assert not packed
        _torch.push_saved_tensors_hooks(hooks)
        x.exp()
        assert packed
    names = "current_saved_tensors_hooks", "get_saved_tensors_hooks"
    assert does_not_exist_in_public(torch.autograd.graph, *names)


# --------------------------------------------------------------------------------------- backwards


def test_parametrizations_are_computed_again_by_one_thread_while_they_are_cached():
    assert does_not_exist_in_public(parametrize, "not_cached", "uncached", "cache")
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with parametrize.cached():
        weight = layer.weight
        with _torch.parametrizations_computed():
            assert layer.weight is not layer.weight
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(lambda: layer.weight).result() is weight
        assert layer.weight is weight
    with _torch.parametrizations_computed(), parametrize.cached():
        pass
    before = parametrize._cache
    first, second = _torch.parametrizations_computed(), _torch.parametrizations_computed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # as of a thread that is done ahead of the other one
    second.__exit__(None, None, None)
    assert parametrize._cache is before
    with parametrize.cached():
        assert layer.weight is layer.weight


def test_backwards_are_numbered_and_call_back_at_their_end():
    events = []

    class Notes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            events.append(_torch.running_backward())
            _torch.after_backward(lambda: events.append("end"))
            return grad

    assert _torch.running_backward() == -1
    x = torch.ones(1, requires_grad=True)
    Notes.apply(Notes.apply(x)).backward()
    Notes.apply(x).backward()
    first, again, *ends, second, end = events
    assert first == again != second and first != -1
    assert [*ends, end] == ["end", "end", "end"]
    names = "current_graph_task_id", "queue_callback", "register_end_of_backward"
    assert does_not_exist_in_public(torch.autograd.graph, *names)


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_the_engine_runs_backwards_without_the_checks_of_the_public_functions(kind):
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    y, grad = (weight * x).as_subclass(kind), torch.arange(3.0)
    edge = torch.autograd.graph.get_gradient_edge(y)
    for root in y, edge:
        found = _torch.run_backward((root,), (grad,), (x,), retain_graph=True, accumulate=False)
        assert found[0].equal(grad) and weight.grad is None and x.grad is None
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        unused = torch.ones(1, requires_grad=True)
        _torch.run_backward((y,), (grad,), (unused,), retain_graph=True, accumulate=False)
    _torch.run_backward((y,), (grad,), (weight,), retain_graph=True)
    assert weight.grad.equal(grad) and x.grad is None
    _torch.run_backward((y,), (grad,))
    assert weight.grad.equal(2 * grad) and x.grad.equal(grad)
    with pytest.raises(RuntimeError, match="a second time"):
        _torch.run_backward((y,), (grad,))
    assert does_not_exist_in_public(torch.autograd.graph, "engine_run_backward", "run_backward")


def test_a_lean_function_gives_what_any_autograd_function_gives():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    checked = Cube.apply
    lean = _torch.lean(Cube).apply
    assert lean is not checked and Cube._backward_cls.apply is Cube.backward

    x = torch.arange(3.0, requires_grad=True)
    assert type(lean(x).grad_fn) is _torch.node_type(Cube)
    (first,) = torch.autograd.grad(lean(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.equal(3 * x**2) and second.equal(6 * x)
    with pytest.raises(RuntimeError, match="must override the setup_context"):
        torch.func.grad(lambda x: lean(x).sum())(torch.ones(3))
    # Once it is C's own, as that of its base is, the decorator can go.
    assert isinstance(vars(torch.autograd.Function)["apply"], classmethod)


def test_of_nodes_that_are_ready_that_with_the_highest_number_runs_first():
    def order(first, second):
        """In which order two nodes run that have these numbers, and are ready at the same time."""
        ran = []
        x = torch.ones(1, requires_grad=True)
        made = x.exp(), x.sin()
        for node, number in zip(made, (first, second), strict=True):
            _torch.set_sequence_number(node.grad_fn, number)
            node.grad_fn.register_prehook(lambda _, number=number: ran.append(number))
        torch.autograd.backward(made)
        return ran

    assert order(10**6, 10**7) == order(10**7, 10**6) == [10**7, 10**6]
    assert does_not_exist_in_public(torch.autograd.graph.Node, "set_sequence_nr", "priority")


def test_nodes_are_numbered_in_the_order_in_which_they_are_made():
    x = torch.ones(1, requires_grad=True)
    first = _torch.next_sequence_number()
    numbers = [_torch.sequence_number(each.grad_fn) for each in (x.exp(), x.sin(), x * x)]
    assert numbers == [first, first + 1, first + 2]
    assert does_not_exist_in_public(torch.autograd.graph.Node, "sequence_nr", "priority")


def test_a_gradient_can_be_taken_where_it_arrives_at_each_result_of_a_node():
    x = torch.arange(3.0, requires_grad=True)
    one, _, three = x.unbind()
    value = one * 2 + three * 5
    grads = torch.autograd.grad(value, _torch.results_of(one.grad_fn), allow_unused=True)
    assert grads == (2, None, 5)
    assert does_not_exist_in_public(torch.autograd.graph.Node, "input_metadata")


def test_hooks_on_gradients_are_seen():
    parameter = nn.Parameter(torch.ones(1))
    assert not any(_torch.gradient_hooks(parameter))
    parameter.register_hook(lambda grad: None)
    assert [bool(hooks) for hooks in _torch.gradient_hooks(parameter)] == [True, False]
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert all(_torch.gradient_hooks(parameter))


# ------------------------------------------------------------------------------ modules, optimizers


def test_layers_of_all_numbers_of_dimensions_have_common_base_classes():
    assert does_not_exist_in_public(nn, "InstanceNorm")
    norms = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LazyInstanceNorm1d
    assert all(issubclass(each, _torch.InstanceNorm) for each in norms)
    for dims in (1, 2, 3):
        assert issubclass(getattr(nn, f"BatchNorm{dims}d"), _torch.BatchNorm)
        assert issubclass(getattr(nn, f"Conv{dims}d"), _torch.ConvNd)
    assert does_not_exist_in_public(nn, "BatchNorm", "ConvNd")


def test_a_recurrent_layer_takes_its_weights_from_a_list_beside_its_parameters():
    layer = nn.LSTM(2, 2)
    flat = vars(layer)[_torch.FLAT_WEIGHTS]
    assert {id(weight) for weight in flat} == {id(p) for p in layer.parameters()}


def test_hooks_on_all_modules_are_seen():
    assert not _torch.any_global_module_hook()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert _torch.any_global_module_hook()
    finally:
        handle.remove()


def test_hooks_on_the_steps_of_an_optimizer_are_seen():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not any(_torch.step_hooks(optimizer))
    optimizer.register_step_post_hook(lambda *_: None)
    assert any(_torch.step_hooks(optimizer))
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert any(_torch.step_hooks(other))
    finally:
        handle.remove()


def test_a_scaler_notes_by_device_whether_gradients_were_inf_and_reads_it_in_step_and_update():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), torch.amp.GradScaler("cpu")
    for value in (1.0, 0.0):
        parameter.grad = scaler.scale(torch.ones(2))
        scaler.unscale_(optimizer)
        found = _torch.infs_found(scaler, optimizer)
        assert {str(device): float(each) for device, each in found.items()} == {"cpu": 0.0}
        found[torch.device("cpu")] = torch.tensor(value)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(parameter, torch.full((2,), value))  # stepped only in the second round
    assert scaler.get_scale() == 2.0**15
    _torch.infs_found(scaler, None)[torch.device("cpu")] = torch.tensor(1.0)
    scaler.update()
    assert scaler.get_scale() == 2.0**14
    assert does_not_exist_in_public(torch.amp.GradScaler, "found_inf", "per_optimizer_states")


def test_a_learning_rate_scheduler_does_not_warn_of_an_optimizer_marked_as_stepped(recwarn):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _torch.mark_stepped(optimizer)
    scheduler.step()
    assert not [w for w in recwarn if "before `optimizer.step()`" in str(w.message)]


def test_whether_distributions_are_validated_is_set_in_public_and_not_told():
    kind = torch.distributions.Distribution
    before = getattr(kind, _torch.VALIDATE_ARGS)
    try:
        for value in (False, True):
            kind.set_default_validate_args(value)
            assert getattr(kind, _torch.VALIDATE_ARGS) is value
    finally:
        kind.set_default_validate_args(before)
    assert does_not_exist_in_public(kind, "get_default_validate_args", "default_validate_args")


# ----------------------------------------------------------------------- what traces have in them


def test_a_module_is_called_by_a_method_that_tracers_leave_alone(monkeypatch):
    called = []
    original = getattr(nn.Module, _torch.CALL)

    def call(module, *args):
        called.append(type(module))
        return original(module, *args)

    monkeypatch.setattr(nn.Module, _torch.CALL, call)
    torch.export.export(nn.Sequential(nn.ReLU()), (torch.ones(2),))
    assert {nn.Sequential, nn.ReLU} <= set(called)


def targets(function, *args):
    class Module(nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    program = torch.export.export(Module(), args, strict=False)
    return {
        node.target
        for module in program.graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    }


def test_an_export_marks_where_a_transform_begins_and_ends():
    found = targets(lambda x: torch.vmap(torch.sin)(x), torch.ones(2))
    if "jvp" in _torch.TRANSFORM_BEGINS.values():
        found |= targets(lambda x: torch.func.jvp(torch.sin, (x,), (x,)), torch.ones(2))
    assert {*_torch.TRANSFORM_BEGINS, *_torch.TRANSFORM_ENDS} <= found


def test_an_export_wraps_what_runs_under_autocast():
    def casts(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    assert _torch.wrap_with_autocast in targets(casts, torch.ones(2, 2))


def test_dynamo_leaves_calls_that_switch_gradients_and_autocast():
    found = set()

    def keep(gm, inputs):
        found.update(node.target for node in gm.graph.nodes)
        return gm.forward

    def switches(x):
        with torch.no_grad():
            x = x + 1
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    torch.compile(switches, backend=keep)(torch.ones(2, 2))
    switched = _torch.SET_GRAD_ENABLED, _torch.ENTER_AUTOCAST, _torch.EXIT_AUTOCAST
    assert found.issuperset(switched)


def test_a_function_that_autograd_applies_goes_by_its_base_class():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    called = []

    def apply(function, *args):
        called.append(function)
        return super(_torch.SingleLevelFunction, function).apply(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch.SingleLevelFunction, "apply", classmethod(apply))
        assert Double.apply(torch.ones(1)).item() == 2
    assert called == [Double]


def test_fx_replaces_methods_by_its_patcher():
    class Greets:
        def hello(self):
            return "hello"

    with _torch.FxPatcher() as patcher:
        patcher.patch_method(Greets, "hello", lambda self: "bye")
        assert Greets().hello() == "bye"
    assert Greets().hello() == "hello"


def test_an_export_switches_backends_off_in_a_context_of_its_own(monkeypatch):
    entered = []

    @contextmanager
    def context():
        entered.append(torch.backends.mkldnn.enabled)
        yield

    monkeypatch.setattr(_torch.EXPORT, _torch.WITHOUT_BACKENDS, context)
    torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
    assert entered


def test_the_code_of_a_lazy_graph_module_is_written_when_it_runs(monkeypatch):
    written = []
    original = fx.Graph.python_code

    def python_code(*args, **kwargs):
        written.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", python_code)
    traced = fx.symbolic_trace(nn.Linear(2, 2))
    written.clear()
    lazy = _torch.LazyGraphModule(traced, traced.graph)
    lazy.recompile()
    assert isinstance(lazy, fx.GraphModule) and not written
    assert torch.equal(lazy(torch.ones(1, 2)), traced(torch.ones(1, 2)))
    assert len(written) == 1
    assert does_not_exist_in_public(fx, "LazyGraphModule")


def test_an_export_asks_for_the_class_of_its_graph_module(monkeypatch):
    asked = []
    original = getattr(_torch.GRAPH_MODULES, _torch.GRAPH_MODULE_CLASS)

    def kind():
        asked.append(True)
        return original()

    monkeypatch.setattr(_torch.GRAPH_MODULES, _torch.GRAPH_MODULE_CLASS, kind)
    torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
    assert asked


def test_an_export_describes_values_beside_their_fakes(monkeypatch):
    """When ``torch.export`` leaves ``tensor_meta`` out, the name goes."""
    monkeypatch.setattr(_torch.PROXIES, _torch.TENSOR_METADATA, lambda value: "described")
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert node.meta["tensor_meta"] == "described"
    assert isinstance(node.meta["val"], _torch.FakeTensor)


def test_an_export_gives_the_tensors_it_has_lost_track_of_as_constants(recwarn):
    """When ``torch.export`` follows ``tensor.data``, or its error tells the module by an attribute,
    ``lost_tensors_as_constants`` goes."""

    class Loses(nn.Module):
        def forward(self, x):
            return x.data * x

    model, x = nn.Sequential(nn.Linear(2, 2), Loses()), torch.ones(1, 2)
    with pytest.raises(RuntimeError, match=r"attribute: 1\.lifted_tensor_0\.") as error:
        torch.export.export(model, (x,), strict=False)
    assert set(vars(error.value)) == set()
    with _torch.lost_tensors_as_constants():
        program = torch.export.export(model, (x,), strict=False)
    ((name, constant),) = program.constants.items()
    assert name == "1.lifted_tensor_0"
    assert isinstance(constant, _torch.FakeTensor)
    assert not [w for w in recwarn if "fake tensor" in str(w.message)]


def exported_with_two_lengths():
    class Adds(nn.Module):
        def forward(self, x, y):
            return x + y

    dynamic = {"x": {1: torch.export.Dim.AUTO}, "y": {1: torch.export.Dim.AUTO}}
    inputs = torch.ones(2, 5), torch.ones(2, 5)
    return torch.export.export(Adds(), inputs, dynamic_shapes=dynamic, strict=False)


def test_a_size_keeps_its_first_symbol_where_an_export_finds_that_it_equals_another():
    """When a public way tells the guards on sizes of an exported program, in terms of the
    dimensions of its inputs, ``first_symbol`` goes."""
    nodes = exported_with_two_lengths().graph.find_nodes(op="placeholder")
    one, other = (node.meta["val"].shape[1] for node in nodes)
    assert one.node.expr == other.node.expr
    assert _torch.first_symbol(one) != _torch.first_symbol(other)


def test_an_export_asks_a_method_for_the_line_that_a_guard_comes_from(monkeypatch):
    original = getattr(ShapeEnv, _torch.SOURCE_OF_GUARD)
    asked = []

    def source(*args, **kwargs):
        found = original(*args, **kwargs)
        asked.append(found)
        return dataclasses.replace(found, framework_loc="elsewhere")

    monkeypatch.setattr(ShapeEnv, _torch.SOURCE_OF_GUARD, source)
    program = exported_with_two_lengths()
    value = program.graph.find_nodes(op="placeholder")[0].meta["val"]
    guards = value.fake_mode.shape_env.guards
    assert asked and {guard.sloc.framework_loc for guard in guards} == {"elsewhere"}


def test_an_export_makes_a_constant_of_a_size_with_many_guards():
    class Compares(nn.Module):
        def forward(self, x):
            return x * sum(x.shape[1] > n for n in range(3, 9))

    def size():
        dynamic = {"x": {1: torch.export.Dim.AUTO}}
        inputs = (torch.ones(2, 99),)
        program = torch.export.export(Compares(), inputs, dynamic_shapes=dynamic, strict=False)
        return program.graph.find_nodes(op="placeholder")[0].meta["val"].shape[1]

    assert not size().node.expr.is_number
    with _torch.at_most_guards(3):
        assert size() == 99


def test_the_node_of_a_graph_gets_a_name_that_is_unique():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    _torch.rename(y, "z")
    assert y.name == "z"
    _torch.rename(y, x.name)
    assert y.name == "x_1"
    assert does_not_exist_in_public(fx.Node, "rename")


def test_a_graph_module_around_others_does_not_compile_them_again(monkeypatch):
    inner = fx.symbolic_trace(nn.ReLU())
    graph = fx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    outer = _torch.OuterModule({"inner": inner}, graph)
    compiled = []
    monkeypatch.setattr(type(inner), "recompile", lambda self: compiled.append(self))
    outer.recompile()
    assert not compiled
    fx.GraphModule({"inner": inner}, graph).recompile()
    assert compiled, "else the subclass is not needed"


# ------------------------------------------------------------------------------------------ Dynamo


def test_a_dimension_that_may_vary_is_marked_on_the_tensor():
    tensor = torch.ones(2, 3)
    assert 1 not in _torch.may_vary(tensor)
    _torch.dynamo().maybe_mark_dynamic(tensor, 1)
    assert 1 in _torch.may_vary(tensor)
    assert does_not_exist_in_public(torch.compiler, "maybe_mark_dynamic")


# ------------------------------------------------------------------------ compilers behind Dynamo


def test_a_backend_compiles_a_graph_for_symbolic_sizes_without_dynamo():
    class Scaled(nn.Module):
        def forward(self, weight, x, n):
            return (x * weight * n,)

    compiler = _torch.graph_compiler("aot_eager", None, None, None)
    inputs = _torch.SymbolicInputs()
    weight = nn.Parameter(torch.ones(3))
    fakes = [inputs.constant(weight), inputs.tensor(torch.empty(4, 3), [0]), inputs.number(5)]
    with inputs.compiling():
        function = compiler(fx.symbolic_trace(Scaled()), fakes)
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(function(weight, x, 7)[0], x * 7)
    assert inputs.admit([x, 7])
    assert not inputs.admit([torch.ones(2, 4), 7])  # this size is no symbol
    assert not inputs.admit([torch.ones(1, 3), 7])  # which broadcasts
    assert does_not_exist_in_public(torch.compiler, "lookup_backend", "compile_graph")


def test_the_strides_of_a_compiled_forward_are_told_as_expressions_of_symbols():
    inputs = _torch.SymbolicInputs()
    rows = inputs.tensor(torch.ones(5, 2), varying=[0]).shape[0]
    (stride,) = (inputs.sizes.evaluate_symexpr(text) for text in [str(rows * 4)])
    assert isinstance(stride, torch.SymInt) and str(stride) == str(rows * 4)
    assert inputs.sizes.evaluate_symexpr("32") == 32
    assert not inputs.sizes.guards


def test_a_backend_takes_a_mode_and_options_as_torch_compile_does():
    _torch.graph_compiler("inductor", "reduce-overhead", None, None)
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        _torch.graph_compiler("inductor", None, {"no_such_option": 1}, None)


def test_dispatch_modes_are_listed_from_the_outside():
    class Mode(_torch.TorchDispatchMode):
        pass

    assert _torch.dispatch_modes() == []
    with Mode() as outer, Mode() as inner:
        assert _torch.dispatch_modes() == [outer, inner]


def test_forward_and_backward_of_a_graph_are_compiled_ahead():
    class Squared(nn.Module):
        def forward(self, x):
            return (x * x,)

    seen = []

    def keep(gm, examples):
        seen.append(gm)
        return _torch.boxed(gm.forward)

    inputs = _torch.SymbolicInputs()
    fakes = [inputs.tensor(torch.empty(4, requires_grad=True), [0])]
    with inputs.compiling():
        function = _torch.compiled_ahead(fx.symbolic_trace(Squared()), fakes, keep, keep)
    x = torch.arange(3.0, requires_grad=True)
    (y,) = function(x)
    assert y.grad_fn.name() == _torch.COMPILED_NODE
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x) and len(seen) == 2


def test_a_boxed_function_empties_the_list_of_its_arguments():
    args = [1, 2]
    assert _torch.boxed(lambda a, b: a + b)(args) == 3
    assert args == []


def test_a_tensor_that_is_exchanged_stays_the_same_object_with_its_hooks_and_weak_references():
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
    reference, seen = weakref.ref(parameter), []
    parameter.kind = "weight"
    parameter.register_hook(lambda grad: seen.append("gradient"))
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    _torch.exchange(parameter, torch.ones(2))
    assert reference() is parameter and parameter.kind == "weight"
    assert parameter.is_leaf and parameter.requires_grad and torch.equal(parameter, torch.ones(2))
    (parameter * 3).sum().backward()
    assert torch.equal(parameter.grad, torch.full((2,), 3.0))
    assert seen == ["gradient", "accumulated"]


def test_a_group_knows_how_long_its_ranks_wait_for_each_other(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        assert _torch.timeout_of(dist.group.WORLD, torch.device("cpu")) == timedelta(seconds=7)
        assert does_not_exist_in_public(dist.ProcessGroup, "timeout", "options")
    finally:
        dist.destroy_process_group()


def test_a_module_in_shards_is_gathered_and_reduced_by_its_caller(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = nn.Linear(2, 2)
        module = fully_shard(nn.Linear(2, 2), mesh=mesh)
        module.load_state_dict({n: distribute_tensor(p, mesh) for n, p in whole.named_parameters()})
        assert _torch.sharded_modules(nn.Sequential(whole, module)) == [module]
        assert _torch.plain_class(type(module)) is nn.Linear is _torch.plain_class(nn.Linear)
        assert any(key.startswith(_torch.SHARDED_STATE) for key in vars(module))
        assert _torch.shard_policies(module) == [(MixedPrecisionPolicy(), OffloadPolicy())]
        assert not _torch.is_told_to_reshard(module)
        assert _torch.is_told_to_reshard(
            fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=True)
        )
        assert module._forward_pre_hooks and module._forward_hooks
        _torch.take_over_shards(module)
        assert not module._forward_pre_hooks and not module._forward_hooks
        module.unshard()
        for _ in range(2):
            module(torch.ones(1, 2)).sum().backward()
        _torch.reduce_shards(module)
        module.reshard()
        assert torch.equal(module.weight.grad.full_tensor(), torch.full((2, 2), 2.0))
        assert does_not_exist_in_public(module, "reduce", "reduce_grads", "post_backward")
    finally:
        dist.destroy_process_group()


def test_a_node_of_an_autograd_graph_knows_the_shape_dtype_and_device_of_its_gradients():
    y = torch.ones(2, 3, requires_grad=True)[:1]
    assert _torch.gradient_kinds(y.grad_fn) == [((1, 3), torch.float32, torch.device("cpu"))]
    (leaf, place), *_ = y.grad_fn.next_functions
    assert _torch.gradient_kinds(leaf)[place][0] == (2, 3)
    assert does_not_exist_in_public(torch.autograd.graph.Node, "input_metadata")


def test_a_kernel_is_a_function_that_calls_an_operator_and_nothing_else():
    """If this fails, no graph of the symbolic front end that calls ``torch.relu`` is kept in the
    cache on disk."""
    assert all(map(_torch.is_kernel, (torch.relu, torch.add, torch.matmul)))
    assert not any(map(_torch.is_kernel, (torch.load, torch.compile, torch.einsum, len, "add")))


def test_divisions_of_sizes_are_functions_of_their_own_in_conditions():
    """If this fails, graphs with conditions on sizes are not kept in the cache on disk."""
    assert {"FloorDiv", "Mod", "PythonMod", "Max", "Min"} <= _torch.SIZE_FUNCTIONS.keys()


@fx.wrap
def _wrapped(x):
    return x


def test_a_function_that_has_been_wrapped_is_known():
    """If this fails, graphs that call such a function are not kept in the cache on disk."""
    assert _torch.is_wrapped(_wrapped)
    assert not any(
        map(
            _torch.is_wrapped,
            (len, torch.relu, None, test_a_function_that_has_been_wrapped_is_known),
        )
    )


def test_kernels_of_convolutions_keep_pictures_with_channels_last_alike_but_not_volumes():
    """If kernels for volumes give one format, too, a test of ``trace/sizes.py`` may have them. If
    PyTorch shows a kernel's format by a public name, ``formats_of_convolution`` goes."""
    for dims, count in (1, 1), (2, 1), (3, 2):
        x, weight = torch.ones(2, *[4] * dims, 5).movedim(-1, 1), torch.ones(3, 5, *[1] * dims)
        assert len(_torch.formats_of_convolution(x, weight)) == count
    assert does_not_exist_in_public(torch, "determine_backend_memory_format")


def test_a_fake_says_that_it_is_where_its_description_has_it(monkeypatch):
    """If this fails, a model on several devices cannot be traced. If fake tensor modes can be told
    a device in public, ``TensorDescriber`` goes."""
    original = getattr(_torch.TensorDescriber, _torch.DESCRIBE)
    other = torch.device("cuda:0")  # the first one, as PyTorch asks the device if there is one

    def describe(*args, **kwargs):
        return dataclasses.replace(original(*args, **kwargs), device=other)

    monkeypatch.setattr(_torch.TensorDescriber, _torch.DESCRIBE, describe)
    for tensor in (torch.ones(3), nn.Parameter(torch.ones(3)), torch.ones(3)[1:]):
        assert _torch.FakeTensorMode().from_tensor(tensor).device == other
    assert does_not_exist_in_public(torch, "FakeTensorMode")


def test_an_export_makes_its_fakes_by_a_mode_of_this_class(monkeypatch):
    """If this fails, a model on "meta" is not traced as it is examined. If an export can be told a
    fake tensor mode in public, ``EXPORTS_MODE`` goes."""
    made = []

    def mode(**options):
        made.append(_torch.FakeTensorMode(**options))
        return made[-1]

    monkeypatch.setattr(_torch.EXPORTS_FAKES, _torch.EXPORTS_MODE, mode)
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
    (linear,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert [linear.meta["val"].fake_mode] == made
    assert does_not_exist_in_public(torch, "FakeTensorMode")


def test_a_backward_is_run_by_the_function_that_can_be_replaced(monkeypatch):
    """If PyTorch runs a backward within the torch function modes that are active where it is
    called, ``RUN_BACKWARD`` goes."""
    ran, original = [], getattr(_torch.BACKWARDS, _torch.RUN_BACKWARD)

    def run(*args, **kwargs):
        ran.append(_torch.function_modes())
        return original(*args, **kwargs)

    monkeypatch.setattr(_torch.BACKWARDS, _torch.RUN_BACKWARD, run)
    x = torch.ones(3, requires_grad=True)
    with torch.overrides.BaseTorchFunctionMode():
        torch.autograd.backward(x.sum())
        torch.autograd.grad(x.sum(), x)
        x.sum().backward()
    assert ran == [()] * 3


def test_an_assertion_takes_the_truth_value_of_a_tensor():
    """If models assert by a public function, or this one leaves a tensor's value where it is, then
    ``ASSERT`` goes."""
    asked = []

    class Asked(torch.Tensor):
        def __bool__(self):
            asked.append(sys._getframe(1).f_code)
            return True

    _torch.ASSERT(torch.ones(()).as_subclass(Asked), "wrong")
    assert asked and _torch.ASSERT.__code__ in asked
    assert does_not_exist_in_public(torch, "assert")

"""Private names of torch, Lightning and torchmetrics that the package uses: each is known, and still there.

A new one is first looked for among the public names, then among those of the files `*_private.py`, and then added to
the table below. Before a new version of torch or Lightning is allowed in pyproject.toml, this test names what it lacks.
"""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import lightning_3d

PACKAGE = Path(lightning_3d.__file__).parent
LIBRARIES = ("lightning", "torch", "torchmetrics")

# Read in torch 2.13 and Lightning 2.6.6: the place that has the names, and for each file those that it uses.
PRIVATE = {
    "torch._C._dynamo.eval_frame": {"module/torch_private": "_FrameAction _FrameExecStrategy"},
    "torch._C._dynamo": {"module/torch_private": "eval_frame"},
    "torch.distributed.tensor.DTensor": {
        "ranks/dtensor_private": "_local_tensor _spec DTensorSpec TensorMeta",
        "zero/fsdp_unit_private": "_local_tensor",
    },
    "torch.distributed.tensor.debug": {"ranks/dtensor_private": "_clear_sharding_prop_cache"},
    "lightning.pytorch.strategies.ParallelStrategy": {"strategy/set_up": "_layer_sync"},
    "lightning.pytorch.callbacks.WeightAveraging": {"usercode/averages_private": "_average_model"},
    "lightning.pytorch.profilers.PyTorchProfiler": {"launch/lightning_private": "_register"},
    "lightning.fabric.strategies.launchers.subprocess_script": {
        "launch/lightning_private": "_ChildProcessObserver _basic_subprocess_cmd",
        "launch/launchers": "_check_can_spawn_children _child_processes",
    },
    "lightning.fabric.utilities.cloud_io": {"launch/lightning_private": "_is_local_file_protocol"},
    "lightning.fabric.utilities.data": {"launch/lightning_private": "_set_sampler_epoch"},
    "lightning.fabric.utilities.distributed": {
        "tools/dryrun/lone_rank": "_InfiniteBarrier",
        "launch/lightning_private": (
            "_get_default_process_group_backend_for_device _init_dist_connection _set_num_threads_if_needed"
        ),
        "data/position": "_sampler",
    },
    "lightning.fabric.utilities.types": {"launch/lightning_private": "_Stateful"},
    "lightning.pytorch.LightningModule": {
        "strategy/placing": "_device_mesh",
        "launch/lightning_private": "_fabric _trainer",
        "strategy/processes": "_on_before_batch_transfer",
    },
    "lightning.pytorch.Trainer": {
        "launch/lightning_private": "_results",
        "strategy/placing strategy/processes": "_accelerator_connector",
        "strategy/resume": "_checkpoint_connector",
        "data/loaders_private": "_data_connector",
        "faults/preemption": "_signal_connector",
    },
    "lightning.pytorch.callbacks.ModelCheckpoint": {
        "checkpoint/last": "_find_last_checkpoints",
        "data/loaders_private": "_last_global_step_saved",
    },
    "lightning.pytorch.core.mixins.hparams_mixin": {
        "launch/lightning_private": "_hparams _hparams_initial _log_hyperparams",
    },
    "lightning.pytorch.trainer.connectors.data_connector": {"data/loaders_private": "_prepare_dataloader"},
    "lightning.pytorch.loops.fit_loop": {
        "data/loaders_private": "_combined_loader _combined_loader_states_to_load _data_fetcher",
        "sandbox/first_batch": "_data_source",
    },
    "lightning.pytorch.loops.training_epoch_loop": {"faults/preemption": "_broadcast_sigterm_tensor"},
    "lightning.pytorch.plugins.precision.Precision": {"precision": "_after_closure"},
    "lightning.pytorch.strategies.Strategy": {
        "sandbox/trial": "_lightning_optimizers _optimizers",
        "strategy/strategy": "_reset_optimizers_and_schedulers",
    },
    "lightning.pytorch.strategies.launchers": {
        "launch/lightning_private": "_MultiProcessingLauncher _SubprocessScriptLauncher",
    },
    "lightning.pytorch.strategies.launchers.launcher": {"launch/lightning_private": "_Launcher"},
    "lightning.pytorch.trainer.connectors.signal_connector": {
        "faults/preemption": "_sigterm_notifier_fn _slurm_sigusr_handler_fn",
    },
    "lightning.pytorch.utilities.combined_loader": {"data/loaders_private": "_load_state_dicts _mode _state_dicts"},
    "lightning.pytorch.utilities.exceptions": {"launch/lightning_private": "_TunerExitException"},
    "lightning.pytorch.utilities.parsing": {"launch/lightning_private": "_hparams_name"},
    "torch": {
        "comm/replicate": "_foreach_copy_",
        "optim/grad_norm": "_foreach_norm",
        "sandbox/without_values": "_has_compatible_shallow_copy_type",
        "checkpoint/pretrained_private module/graph_private module/torch_private ranks/dtensor_private": "_C",
    },
    "torch.Tensor": {
        "module/torch_private": "_backward_hooks _base _cdata _post_accumulate_grad_hooks _version",
        "zero/fsdp_unit_private": "_backward_hooks _base",
        "zero/changed_weights tensor/late_tensor": "_base",
        "zero/fsdp_seam": "_make_wrapper_subclass",
        "sandbox/build_recorder": "_typed_storage",
        "zero/fsdp_private": "_post_accumulate_grad_hooks",
        "module/packed_weights": "_indices _values",
        "strategy/checks": "_nnz",
        "sandbox/without_values": "_version",
    },
    "torch._C": {
        "module/torch_private": (
            "_SetExcludeDispatchKeyGuard _TorchDispatchModeKey _are_functorch_transforms_active _functorch _autograd "
            "_current_graph_task_id _disabled_torch_function_impl _get_dispatch_mode _storage_Use_Count"
        ),
        "module/graph_private": "_autograd",
    },
    "torch._C._functions.MulBackward0": {"module/graph_private": "_saved_other"},
    "torch._C._functions.NllLossBackward0": {"module/graph_private": "_saved_target"},
    "torch._C._autograd": {
        "module/graph_private": "_get_sequence_nr",
        "module/torch_private": "_top_saved_tensors_default_hooks",
    },
    "torch._dynamo.eval_frame.OptimizedModule": {"module/torch_private": "_orig_mod"},
    "torch._functorch.pyfunctorch": {"module/torch_private": "temporarily_clear_interpreter_stack"},
    "torch.autograd.function.BackwardCFunction": {"module/graph_private": "_forward_cls"},
    "torch.autograd.graph.Node": {"module/graph_private": "_input_metadata _sequence_nr"},
    "torch._library.effects": {"module/graph_private": "EffectType"},
    "torch._ops": {"module/torch_private": "HigherOrderOperator _overloadpacket _schema"},
    "torch._subclasses.fake_tensor": {
        "module/torch_private": "DataDependentOutputException DynamicOutputShapeException FakeTensor FakeTensorMode",
    },
    "torch._subclasses": {"module/torch_private": "fake_tensor"},
    "torch.utils": {"module/torch_private": "_python_dispatch _pytree"},
    "torch.utils._python_dispatch": {"module/torch_private": "TorchDispatchMode _disable_current_modes"},
    "torch.utils._pytree": {"module/torch_private": "tree_leaves tree_map tree_map_only"},
    "torch.amp.GradScaler": {"precision": "_found_inf_per_device _device"},
    "torch.distributed.ProcessGroupGloo": {"ranks/process_groups_private": "_timeout"},
    "torch.autograd.forward_ad": {"module/torch_private": "_current_level"},
    "torch.autograd.profiler": {"module/torch_private": "_is_profiler_enabled"},
    "torch.autograd.Variable": {"module/torch_private": "_execution_engine"},
    "torch.distributed.ProcessGroup": {
        "ranks/process_groups_private": "_device_types _get_backend _get_sequence_number_for_group",
    },
    "torch.distributed._composable.contract": {"zero/fsdp_private": "REGISTRY_KEY STATE_KEY"},
    "torch.distributed._composable_state": {"zero/fsdp_private": "_module_state_mapping"},
    "torch.distributed.device_mesh.DeviceMesh": {"ranks/mesh": "_flatten _unflatten"},
    "torch.distributed.distributed_c10d": {
        "ranks/process_groups_private": "_World _get_default_store _unregister_all_process_groups _world",
        "ranks/users_group_private": "_WorldMeta _canonicalize_group_rank _get_default_group",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_api": {"zero/fsdp_private": "AllGather ReduceScatter"},
    "torch.distributed.fsdp._fully_shard._fsdp_common": {
        "zero/fsdp_private": "DDPMeshInfo",
        "zero/fsdp_unit_private": "TrainingState",
    },
    "torch.distributed.fsdp._fully_shard": {"tools/dryrun/lone_rank": "_fsdp_param"},
    "torch.distributed.fsdp._fully_shard._fsdp_param": {
        "zero/fsdp_private": (
            "FSDPParam _module_info _orig_size _post_load_hook_handle _sharded_local_tensor _unsharded_param"
        ),
        "tools/dryrun/lone_rank": "_chunk_with_empty",
        "zero/fsdp_unit_private": "_module_info _sharded_param_data _unsharded_param",
        "zero/changed_weights": "_unsharded_param",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": {
        "zero/fsdp_private": (
            "_all_gather_comm _all_gather_result _all_reduce_hook _module_to_pre_load_state_dict_hook_handle "
            "_module_to_pre_save_state_dict_hook_handle _post_forward_indices _reduce_scatter_comm "
            "_reduce_scatter_process_group _reshard_after_forward _reshard_after_forward_event _to_sharded"
        ),
        "zero/fsdp_unit_private": (
            "_all_gather_process_group _all_gather_result _register_post_backward_hook _to_sharded _to_unsharded "
            "_training_state"
        ),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state": {
        "zero/fsdp_private": (
            "_states_to_forward_prefetch _comm_ctx _fsdp_param_group _fsdp_param_groups _get_module_fsdp_state "
            "_lazy_init _post_forward_hook_handle _pre_backward _pre_forward_hook_handle "
            "_register_root_post_backward_final_callback _root_post_backward_final_callback _root_pre_forward "
            "_state_ctx"
        ),
        "zero/fsdp_unit_private": "_pre_backward _register_pre_backward_hook",
    },
    "torch.distributed.fsdp._fully_shard._fully_shard": {
        "zero/fsdp_private": "_fsdp_use_orig_params _is_fsdp_managed_module cls_to_fsdp_cls",
    },
    "torch.distributed.pipelining._backward": {"pipeline/backward": "stage_backward_input stage_backward_weight"},
    "torch.distributed.pipelining.schedules": {"pipeline/schedule": "_Action _ComputationType _add_send_recv"},
    "torch.nn.Module": {
        "launch/lightning_private": "_buffers _modules _parameters",
        "module/torch_private": (
            "_apply _buffers _modules _backward_pre_hooks _forward_hooks _forward_hooks_always_called "
            "_forward_hooks_with_kwargs "
            "_forward_pre_hooks _forward_pre_hooks_with_kwargs _load_from_state_dict _non_persistent_buffers_set "
            "_load_state_dict_post_hooks _load_state_dict_pre_hooks _parameters _compiled_call_impl"
        ),
        "usercode/averages_private": "_buffers _parameters",
        "tools/dryrun/lone_rank tools/dryrun/simulation": "_apply",
        "pipeline/units": "_modules",
        "zero/fsdp_private zero/fsdp_unit_private zero/outside_units": "_parameters",
    },
    "torch.nn.MultiheadAttention": {"tensor/attention": "_qkv_same_embed_dim"},
    "torch.nn.modules.batchnorm": {
        "zero/data_batch_norm": "_BatchNorm _check_input_dim",
        "pipeline/units": "_NormBase",
    },
    "torch.nn.utils.clip_grad": {"optim/grad_norm": "_get_total_norm _group_tensors_by_device_and_dtype"},
    "torch.ops.aten": {
        "module/torch_private": (
            "_efficient_attention_forward _flash_attention_forward _grouped_mm _scaled_dot_product_cudnn_attention "
            "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention "
            "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention "
            "_scaled_dot_product_flash_attention_backward _scaled_dot_product_fused_attention_overrideable _scaled_mm "
            "_local_scalar_dense _scaled_dot_product_flash_attention_for_cpu "
            "_scaled_dot_product_flash_attention_for_cpu_backward _to_copy _unsafe_view"
        ),
        "tensor/regions": "_grouped_mm",
    },
    "torch.optim.Optimizer": {
        "optim/step": "_optimizer_state_dict_post_hooks",
        "optim/step_from_disk": "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
    },
    "torch.testing._internal.distributed.fake_pg": {"tools/dryrun/simulated_rank": "FakeStore"},
    "torch.utils.checkpoint": {"tensor/recompute": "_checkpoint_without_reentrant_generator"},
    "torch.utils.data.DataLoader": {"data/position": "_iterator"},
    "torchmetrics.Metric": {
        "sandbox/metric_replay_private": "_copy_state_dict _filter_kwargs _forward_cache _to_sync _update_count",
    },
    "torchmetrics.MetricCollection": {
        "sandbox/metric_replay_private": "_enable_compute_groups _groups _groups_checked",
    },
}
USES = defaultdict(list)
for files, names in (entry for uses in PRIVATE.values() for entry in uses.items()):
    for name in names.split():
        USES[name] += files.split()
ONE_OF_TWO = {"_fsdp_param_group", "_fsdp_param_groups"}
"""torch 2.11 has the first, torch 2.13 the second."""
NOT_THEIRS = {
    "_actions", "_asdict", "_attn_implementation", "_current_frames", "_exit", "_experts_implementation", "_fields", "_get",
    "_getframe", "_is_expert_parallel",
}  # fmt: skip
"""Attributes of Python's own classes and modules, of jsonargparse's and of transformers'."""
NO_NAMES = {
    "_dataloader", "_epoch", "_foreach", "_foreach_", "_impl", "_lightning_3d_absent", "_lightning_3d_copy", "_lightning_3d_owner", "_local_scalar",
    "_is_any_true", "_logger", "_no_grad_", "_offload", "_parallel_size", "_per_second", "_recorded", "_sum_over_ranks", "_us",
}  # fmt: skip
"""Beginnings and ends of names, and attributes that the package sets on objects of others."""


def _names(path):
    return set(" ".join(PRIVATE[path].values()).split())


def _is_private(name):
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def _own_names(trees):
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.arg):
                yield node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                yield node.attr


def _foreign_names(tree, own):
    """Private names that a file imports from the libraries, reads as attributes, or has as strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            private = any(map(_is_private, node.module.split(".")))
            yield from (alias.name for alias in node.names if private or _is_private(alias.name))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private(node.value):
            yield from {node.value} - own


def _found():
    trees = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
    own = set(_own_names(trees.values())) - USES.keys()  # a name of ours hides none of theirs in another file
    for file, tree in trees.items():
        place = file.relative_to(PACKAGE).with_suffix("").as_posix()
        yield from {(name, place) for name in _foreign_names(tree, own.union(_own_names([tree])))}


def test_no_private_name_is_new():
    known = NOT_THEIRS | NO_NAMES
    new = sorted(
        f"{place}: {name}" for name, place in _found() if name not in known and place not in USES.get(name, [])
    )
    assert new == []


def test_few_places_have_a_private_name_outside_of_the_files_for_them():
    """The number may only fall."""
    known = NOT_THEIRS | NO_NAMES
    places = {(name, place) for name, place in _found() if name not in known and not place.endswith("_private")}
    assert len(places) <= 60


def _resolve(path):
    module = path
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module = module.rpartition(".")[0]
    for name in path.removeprefix(module).strip(".").split(".") if path != module else ():
        found = getattr(found, name)
    return found


def _has(owner, name):
    """Return True if `owner` has `name`, or code that sets it on its objects."""
    if hasattr(owner, name):
        return True
    code = inspect.getmodule(owner)
    return (
        code is not None
        and Path(code.__file__).is_file()
        and re.search(rf"\b{name}\b", inspect.getsource(code)) is not None
    )


@pytest.mark.parametrize("path", PRIVATE)
def test_private_names_are_still_there(path):
    owner = _resolve(path)
    missing = [name for name in _names(path) if name not in ONE_OF_TWO and not _has(owner, name)]
    assert missing == [], f"{path} of torch {torch.__version__} has no {', '.join(missing)}"


def test_one_of_the_two_is_there():
    (path,) = [path for path in PRIVATE if _names(path) >= ONE_OF_TWO]
    assert any(_has(_resolve(path), name) for name in ONE_OF_TWO)

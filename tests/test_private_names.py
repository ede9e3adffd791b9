"""Private names of torch, Lightning and torchmetrics that the package uses: each is known, and still there.

A new one is first looked for among the public names, then among those of the files `*_private.py`, and then added to
the table below. Before a new version of torch or Lightning is allowed in pyproject.toml, this test names what it lacks.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import lightning_3d

PACKAGE = Path(lightning_3d.__file__).parent
LIBRARIES = ("lightning", "torch", "torchmetrics")

# Read in torch 2.13 and Lightning 2.6.6: the place that has the name, the name, the files that use it.
PRIVATE = {
    "torch.distributed.tensor.DTensor": {
        "_local_tensor": "ranks/dtensor_private zero/fsdp_unit_private",
        "_spec": "ranks/dtensor_private",
        "DTensorSpec": "ranks/dtensor_private",
        "TensorMeta": "ranks/dtensor_private",
    },
    "torch.distributed.tensor.debug": {"_clear_sharding_prop_cache": "ranks/dtensor_private"},
    "lightning.pytorch.strategies.ParallelStrategy": {"_layer_sync": "strategy/set_up"},
    "lightning.pytorch.callbacks.WeightAveraging": {"_average_model": "usercode/averages_private"},
    "lightning.pytorch.profilers.PyTorchProfiler": {"_register": "launch/lightning_private"},
    "lightning.fabric.strategies.launchers.subprocess_script": {
        "_ChildProcessObserver": "launch/lightning_private",
        "_basic_subprocess_cmd": "launch/lightning_private",
        "_check_can_spawn_children": "launch/launchers",
        "_child_processes": "launch/launchers",
    },
    "lightning.fabric.utilities.cloud_io": {"_is_local_file_protocol": "launch/lightning_private"},
    "lightning.fabric.utilities.data": {"_set_sampler_epoch": "launch/lightning_private"},
    "lightning.fabric.utilities.distributed": {
        "_InfiniteBarrier": "tools/dryrun/lone_rank",
        "_get_default_process_group_backend_for_device": "launch/lightning_private",
        "_init_dist_connection": "launch/lightning_private",
        "_sampler": "data/position",
        "_set_num_threads_if_needed": "launch/lightning_private",
    },
    "lightning.fabric.utilities.types": {"_Stateful": "launch/lightning_private"},
    "lightning.pytorch.LightningModule": {
        "_device_mesh": "strategy/placing",
        "_fabric": "launch/lightning_private",
        "_on_before_batch_transfer": "strategy/processes",
        "_trainer": "launch/lightning_private",
    },
    "lightning.pytorch.Trainer": {
        "_results": "launch/lightning_private",
        "_accelerator_connector": "strategy/placing strategy/processes",
        "_checkpoint_connector": "strategy/resume",
        "_data_connector": "data/loaders_private",
        "_signal_connector": "faults/preemption",
    },
    "lightning.pytorch.callbacks.ModelCheckpoint": {
        "_find_last_checkpoints": "checkpoint/last",
        "_last_global_step_saved": "data/loaders_private",
    },
    "lightning.pytorch.core.mixins.hparams_mixin": {
        "_hparams": "launch/lightning_private",
        "_hparams_initial": "launch/lightning_private",
        "_log_hyperparams": "launch/lightning_private",
    },
    "lightning.pytorch.trainer.connectors.data_connector": {"_prepare_dataloader": "data/loaders_private"},
    "lightning.pytorch.loops.fit_loop": {
        "_combined_loader": "data/loaders_private",
        "_combined_loader_states_to_load": "data/loaders_private",
        "_data_fetcher": "data/loaders_private",
        "_data_source": "sandbox/first_batch",
    },
    "lightning.pytorch.loops.training_epoch_loop": {"_broadcast_sigterm_tensor": "faults/preemption"},
    "lightning.pytorch.plugins.precision.Precision": {"_after_closure": "precision"},
    "lightning.pytorch.strategies.Strategy": {
        "_lightning_optimizers": "sandbox/trial",
        "_optimizers": "sandbox/trial",
        "_reset_optimizers_and_schedulers": "strategy/strategy",
    },
    "lightning.pytorch.strategies.launchers": {
        "_MultiProcessingLauncher": "launch/lightning_private",
        "_SubprocessScriptLauncher": "launch/lightning_private",
    },
    "lightning.pytorch.strategies.launchers.launcher": {"_Launcher": "launch/lightning_private"},
    "lightning.pytorch.trainer.connectors.signal_connector": {
        "_sigterm_notifier_fn": "faults/preemption",
        "_slurm_sigusr_handler_fn": "faults/preemption",
    },
    "lightning.pytorch.utilities.combined_loader": {
        "_load_state_dicts": "data/loaders_private",
        "_mode": "data/loaders_private",
        "_state_dicts": "data/loaders_private",
    },
    "lightning.pytorch.utilities.exceptions": {"_TunerExitException": "launch/lightning_private"},
    "lightning.pytorch.utilities.parsing": {"_hparams_name": "launch/lightning_private"},
    "torch": {
        "_foreach_copy_": "comm/replicate",
        "_foreach_norm": "optim/grad_norm",
        "_has_compatible_shallow_copy_type": "sandbox/without_values",
        "_C": "checkpoint/pretrained_private module/graph_private module/torch_private ranks/dtensor_private",
    },
    "torch.Tensor": {
        "_backward_hooks": "module/torch_private zero/fsdp_unit_private",
        "_base": "zero/changed_weights tensor/late_tensor zero/fsdp_unit_private",
        "_cdata": "module/torch_private",
        "_make_wrapper_subclass": "zero/fsdp_seam",
        "_typed_storage": "sandbox/build_recorder",
        "_post_accumulate_grad_hooks": "module/torch_private zero/fsdp_private",
        "_indices": "module/packed_weights",
        "_values": "module/packed_weights",
        "_nnz": "strategy/checks",
        "_version": "module/torch_private sandbox/without_values",
    },
    "torch._C": {
        "_SetExcludeDispatchKeyGuard": "module/torch_private",
        "_TorchDispatchModeKey": "module/torch_private",
        "_are_functorch_transforms_active": "module/torch_private",
        "_functorch": "module/torch_private",
        "_autograd": "module/graph_private module/torch_private",
        "_current_graph_task_id": "module/torch_private",
        "_disabled_torch_function_impl": "module/torch_private",
        "_get_dispatch_mode": "module/torch_private",
        "_storage_Use_Count": "module/torch_private",
    },
    "torch._C._functions.NllLossBackward0": {"_saved_target": "module/graph_private"},
    "torch._C._autograd": {
        "_get_sequence_nr": "module/graph_private",
        "_top_saved_tensors_default_hooks": "module/torch_private",
    },
    "torch._dynamo.eval_frame.OptimizedModule": {"_orig_mod": "module/torch_private"},
    "torch._functorch.pyfunctorch": {"temporarily_clear_interpreter_stack": "module/torch_private"},
    "torch.autograd.function.BackwardCFunction": {"_forward_cls": "module/graph_private"},
    "torch.autograd.graph.Node": {"_input_metadata": "module/graph_private", "_sequence_nr": "module/graph_private"},
    "torch._library.effects": {"EffectType": "module/graph_private"},
    "torch._ops": {"_overloadpacket": "module/torch_private", "_schema": "module/torch_private"},
    "torch._subclasses.fake_tensor": {
        "DataDependentOutputException": "module/torch_private",
        "DynamicOutputShapeException": "module/torch_private",
        "FakeTensor": "module/torch_private",
        "FakeTensorMode": "module/torch_private",
    },
    "torch._subclasses": {"fake_tensor": "module/torch_private"},
    "torch.utils": {"_python_dispatch": "module/torch_private", "_pytree": "module/torch_private"},
    "torch.utils._python_dispatch": dict.fromkeys(
        ("TorchDispatchMode", "_disable_current_modes"), "module/torch_private"
    ),
    "torch.utils._pytree": dict.fromkeys(("tree_leaves", "tree_map", "tree_map_only"), "module/torch_private"),
    "torch.amp.GradScaler": {"_found_inf_per_device": "precision", "_device": "precision"},
    "torch.distributed.ProcessGroupGloo": {"_timeout": "ranks/process_groups_private"},
    "torch.autograd.forward_ad": {"_current_level": "module/torch_private"},
    "torch.autograd.profiler": {"_is_profiler_enabled": "module/torch_private"},
    "torch.autograd.Variable": {"_execution_engine": "module/torch_private"},
    "torch.distributed.ProcessGroup": {
        "_device_types": "ranks/process_groups_private",
        "_get_backend": "ranks/process_groups_private",
        "_get_sequence_number_for_group": "ranks/process_groups_private",
    },
    "torch.distributed._composable.contract": {"REGISTRY_KEY": "zero/fsdp_private", "STATE_KEY": "zero/fsdp_private"},
    "torch.distributed._composable_state": {"_module_state_mapping": "zero/fsdp_private"},
    "torch.distributed.device_mesh.DeviceMesh": {"_flatten": "ranks/mesh", "_unflatten": "ranks/mesh"},
    "torch.distributed.distributed_c10d": {
        "_World": "ranks/process_groups_private",
        "_WorldMeta": "ranks/users_group_private",
        "_canonicalize_group_rank": "ranks/users_group_private",
        "_get_default_group": "ranks/users_group_private",
        "_get_default_store": "ranks/process_groups_private",
        "_unregister_all_process_groups": "ranks/process_groups_private",
        "_world": "ranks/process_groups_private",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_api": {
        "AllGather": "zero/fsdp_private",
        "ReduceScatter": "zero/fsdp_private",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": {
        "DefaultAllGather": "zero/fsdp_private",
        "DefaultReduceScatter": "zero/fsdp_private",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_common": {
        "DDPMeshInfo": "zero/fsdp_private",
        "TrainingState": "zero/fsdp_unit_private",
    },
    "torch.distributed.fsdp._fully_shard": {"_fsdp_param": "tools/dryrun/lone_rank"},
    "torch.distributed.fsdp._fully_shard._fsdp_param": {
        "FSDPParam": "zero/fsdp_private",
        "_chunk_with_empty": "tools/dryrun/lone_rank",
        "_module_info": "zero/fsdp_private zero/fsdp_unit_private",
        "_orig_size": "zero/fsdp_private",
        "_post_load_hook_handle": "zero/fsdp_private",
        "_sharded_local_tensor": "zero/fsdp_private",
        "_sharded_param_data": "zero/fsdp_unit_private",
        "_unsharded_param": "zero/changed_weights zero/fsdp_private zero/fsdp_unit_private",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": {
        "_all_gather_comm": "zero/fsdp_private",
        "_all_gather_process_group": "zero/fsdp_unit_private",
        "_all_gather_result": "zero/fsdp_private zero/fsdp_unit_private",
        "_all_reduce_hook": "zero/fsdp_private",
        "_module_to_pre_load_state_dict_hook_handle": "zero/fsdp_private",
        "_module_to_pre_save_state_dict_hook_handle": "zero/fsdp_private",
        "_post_forward_indices": "zero/fsdp_private",
        "_reduce_scatter_comm": "zero/fsdp_private",
        "_reduce_scatter_process_group": "zero/fsdp_private",
        "_reshard_after_forward": "zero/fsdp_private",
        "_reshard_after_forward_event": "zero/fsdp_private",
        "_register_post_backward_hook": "zero/fsdp_unit_private",
        "_to_sharded": "zero/fsdp_private zero/fsdp_unit_private",
        "_to_unsharded": "zero/fsdp_unit_private",
        "_training_state": "zero/fsdp_unit_private",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state": {
        "_states_to_forward_prefetch": "zero/fsdp_private",
        "_comm_ctx": "zero/fsdp_private",
        "_fsdp_param_group": "zero/fsdp_private",
        "_fsdp_param_groups": "zero/fsdp_private",
        "_get_module_fsdp_state": "zero/fsdp_private",
        "_lazy_init": "zero/fsdp_private",
        "_post_forward_hook_handle": "zero/fsdp_private",
        "_pre_backward": "zero/fsdp_private zero/fsdp_unit_private",
        "_pre_forward_hook_handle": "zero/fsdp_private",
        "_register_pre_backward_hook": "zero/fsdp_unit_private",
        "_register_root_post_backward_final_callback": "zero/fsdp_private",
        "_root_post_backward_final_callback": "zero/fsdp_private",
        "_root_pre_forward": "zero/fsdp_private",
        "_state_ctx": "zero/fsdp_private",
    },
    "torch.distributed.fsdp._fully_shard._fully_shard": {
        "_fsdp_use_orig_params": "zero/fsdp_private",
        "_is_fsdp_managed_module": "zero/fsdp_private",
        "cls_to_fsdp_cls": "zero/fsdp_private",
    },
    "torch.distributed.pipelining._backward": {
        "stage_backward_input": "pipeline/backward",
        "stage_backward_weight": "pipeline/backward",
    },
    "torch.distributed.pipelining.schedules": {
        "_Action": "pipeline/schedule",
        "_ComputationType": "pipeline/schedule",
        "_add_send_recv": "pipeline/schedule",
    },
    "torch.nn.Module": {
        "_buffers": "launch/lightning_private module/torch_private usercode/averages_private",
        "_apply": "tools/dryrun/lone_rank tools/dryrun/simulation",
        "_backward_pre_hooks": "module/torch_private",
        "_forward_hooks": "module/torch_private",
        "_forward_hooks_always_called": "module/torch_private",
        "_forward_hooks_with_kwargs": "module/torch_private",
        "_forward_pre_hooks": "module/torch_private",
        "_forward_pre_hooks_with_kwargs": "module/torch_private",
        "_load_from_state_dict": "module/torch_private",
        "_non_persistent_buffers_set": "module/torch_private",
        "_load_state_dict_post_hooks": "module/torch_private",
        "_load_state_dict_pre_hooks": "module/torch_private",
        "_modules": "launch/lightning_private pipeline/units",
        "_parameters": "launch/lightning_private module/torch_private usercode/averages_private zero/fsdp_private zero/fsdp_unit_private zero/outside_units",
        "_compiled_call_impl": "module/torch_private",
    },
    "torch.nn.MultiheadAttention": {"_qkv_same_embed_dim": "tensor/attention"},
    "torch.nn.modules.batchnorm": {
        "_BatchNorm": "zero/data_batch_norm",
        "_NormBase": "pipeline/units",
        "_check_input_dim": "zero/data_batch_norm",
    },
    "torch.nn.utils.clip_grad": {
        "_get_total_norm": "optim/grad_norm",
        "_group_tensors_by_device_and_dtype": "optim/grad_norm",
    },
    "torch.ops.aten": {
        "_efficient_attention_forward": "module/torch_private",
        "_flash_attention_forward": "module/torch_private",
        "_grouped_mm": "module/torch_private tensor/regions",
        "_scaled_dot_product_cudnn_attention": "module/torch_private",
        "_scaled_dot_product_cudnn_attention_backward": "module/torch_private",
        "_scaled_dot_product_efficient_attention": "module/torch_private",
        "_scaled_dot_product_efficient_attention_backward": "module/torch_private",
        "_scaled_dot_product_flash_attention": "module/torch_private",
        "_scaled_dot_product_flash_attention_backward": "module/torch_private",
        "_scaled_dot_product_fused_attention_overrideable": "module/torch_private",
        "_scaled_mm": "module/torch_private",
        "_local_scalar_dense": "module/torch_private",
        "_scaled_dot_product_flash_attention_for_cpu": "module/torch_private",
        "_scaled_dot_product_flash_attention_for_cpu_backward": "module/torch_private",
        "_to_copy": "module/torch_private",
        "_unsafe_view": "module/torch_private",
    },
    "torch.optim.Optimizer": {
        "_optimizer_state_dict_post_hooks": "optim/step",
        "_optimizer_step_post_hooks": "optim/step_from_disk",
        "_optimizer_step_pre_hooks": "optim/step_from_disk",
    },
    "torch.testing._internal.distributed.fake_pg": {"FakeStore": "tools/dryrun/simulated_rank"},
    "torch.utils.checkpoint": {"_checkpoint_without_reentrant_generator": "tensor/recompute"},
    "torch.utils.data.DataLoader": {"_iterator": "data/position"},
    "torchmetrics.Metric": {
        "_copy_state_dict": "sandbox/metric_replay_private",
        "_filter_kwargs": "sandbox/metric_replay_private",
        "_forward_cache": "sandbox/metric_replay_private",
        "_to_sync": "sandbox/metric_replay_private",
        "_update_count": "sandbox/metric_replay_private",
    },
    "torchmetrics.MetricCollection": {
        "_enable_compute_groups": "sandbox/metric_replay_private",
        "_groups": "sandbox/metric_replay_private",
        "_groups_checked": "sandbox/metric_replay_private",
    },
}
USES = {name: files.split() for names in PRIVATE.values() for name, files in names.items()}
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


def _is_private(name):
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def _own_names(trees):
    """Names that the package defines."""
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
    missing = [name for name in PRIVATE[path] if name not in ONE_OF_TWO and not _has(owner, name)]
    assert missing == [], f"{path} of torch {torch.__version__} has no {', '.join(missing)}"


def test_one_of_the_two_is_there():
    (path,) = [path for path, names in PRIVATE.items() if names.keys() >= ONE_OF_TWO]
    assert any(_has(_resolve(path), name) for name in ONE_OF_TWO)

"""Devices, layout, time and money of a training, before anything runs. Pure arithmetic, usable by itself.

Closed forms take and give plain numbers: bytes, elements, FLOPs, seconds, dollars. `search(job, cluster)` prices every
layout; `choose_layout` picks one.
"""

from lightning_3d.planner.bubble import PassTimes as PassTimes
from lightning_3d.planner.bubble import bubble_over_ideal as bubble_over_ideal
from lightning_3d.planner.bubble import bubble_share as bubble_share
from lightning_3d.planner.bubble import bubble_time as bubble_time
from lightning_3d.planner.bubble import zero_bubble_time as zero_bubble_time
from lightning_3d.planner.catalogue import Catalogue as Catalogue
from lightning_3d.planner.choose import choose_layout as choose_layout
from lightning_3d.planner.formulas import data_elements as data_elements
from lightning_3d.planner.formulas import devices_for as devices_for
from lightning_3d.planner.formulas import energy_kwh as energy_kwh
from lightning_3d.planner.formulas import gpt_first_stage_activations as gpt_first_stage_activations
from lightning_3d.planner.formulas import gpt_flops as gpt_flops
from lightning_3d.planner.formulas import gpt_layer_activations as gpt_layer_activations
from lightning_3d.planner.formulas import gpt_parameters as gpt_parameters
from lightning_3d.planner.formulas import inference_devices as inference_devices
from lightning_3d.planner.formulas import iteration_seconds as iteration_seconds
from lightning_3d.planner.formulas import microbatches_held as microbatches_held
from lightning_3d.planner.formulas import pipeline_elements as pipeline_elements
from lightning_3d.planner.formulas import powersgd_elements as powersgd_elements
from lightning_3d.planner.formulas import rent as rent
from lightning_3d.planner.formulas import ring_all_reduce as ring_all_reduce
from lightning_3d.planner.formulas import ring_reduce_scatter as ring_reduce_scatter
from lightning_3d.planner.formulas import rule_of_thumb_constant as rule_of_thumb_constant
from lightning_3d.planner.formulas import rule_of_thumb_hours as rule_of_thumb_hours
from lightning_3d.planner.formulas import tensor_elements as tensor_elements
from lightning_3d.planner.formulas import training_seconds as training_seconds
from lightning_3d.planner.formulas import utilisation as utilisation
from lightning_3d.planner.formulas import zero_elements as zero_elements
from lightning_3d.planner.hardware import Accelerator as Accelerator
from lightning_3d.planner.hardware import Cluster as Cluster
from lightning_3d.planner.job import Job as Job
from lightning_3d.planner.model_names import named_model as named_model
from lightning_3d.planner.number_bytes import NumberBytes as NumberBytes
from lightning_3d.planner.number_bytes import number_bytes as number_bytes
from lightning_3d.planner.priced_layout import Plan as Plan
from lightning_3d.planner.profile import Profile as Profile
from lightning_3d.planner.search import Pins as Pins
from lightning_3d.planner.search import search as search
from lightning_3d.planner.states import StateBytes as StateBytes
from lightning_3d.planner.states import largest_model as largest_model
from lightning_3d.planner.states import sharded_states as sharded_states
from lightning_3d.planner.states import state_bytes as state_bytes
from lightning_3d.planner.transformer import Transformer as Transformer

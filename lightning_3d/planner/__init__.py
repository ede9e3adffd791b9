"""Devices, layout, time and money of a training, before anything runs. Pure arithmetic, usable by itself.

`search(job, cluster)` prices every layout; `choose_layout` picks one.
"""

from lightning_3d.planner.catalogue import Catalogue as Catalogue
from lightning_3d.planner.choose import choose_layout as choose_layout
from lightning_3d.planner.hardware import Accelerator as Accelerator
from lightning_3d.planner.hardware import Cluster as Cluster
from lightning_3d.planner.job import Job as Job
from lightning_3d.planner.model_names import named_model as named_model
from lightning_3d.planner.priced_layout import Plan as Plan
from lightning_3d.planner.profile import Profile as Profile
from lightning_3d.planner.search import Pins as Pins
from lightning_3d.planner.search import search as search
from lightning_3d.planner.transformer import Transformer as Transformer

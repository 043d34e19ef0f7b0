"""The public names of Unskew, each with its home. `unskew/__init__.py` reads this file; names are written here only."""

from unskew.analysis.classifiers import (
    class_norms as class_norms,
    direction_alignment as direction_alignment,
    norm_difference as norm_difference,
)
from unskew.analysis.compute import (
    classifier_flops as classifier_flops,
    forward_flops as forward_flops,
    moments_flops as moments_flops,
    step_cost as step_cost,
)
from unskew.analysis.embedding import tsne as tsne
from unskew.analysis.inversion import invert as invert, privacy_audit as privacy_audit
from unskew.analysis.separability import mean_distance as mean_distance, sliced_wasserstein as sliced_wasserstein
from unskew.analysis.similarity import (
    Similarities as Similarities,
    cka as cka,
    layer_similarities as layer_similarities,
    mean_similarity as mean_similarity,
)
from unskew.calibration.calibrator import Calibrator as Calibrator
from unskew.calibration.discriminants import fedcof as fedcof, gnb as gnb, lda as lda, ncm as ncm
from unskew.calibration.estimator import CalibratedHead as CalibratedHead
from unskew.calibration.influence import influences as influences
from unskew.calibration.retraining import oracle as oracle
from unskew.calibration.ridge import ffc as ffc
from unskew.calibration.selection import calibrate as calibrate
from unskew.calibration.virtual import ccvr as ccvr
from unskew.conversation.messages import Fault as Fault
from unskew.conversation.model_file import load_model as load_model
from unskew.conversation.protocol import (
    Result as Result,
    reply as reply,
    serve as serve,
    talk as talk,
)
from unskew.conversation.roster import Roster as Roster
from unskew.conversation.tasks import Task as Task
from unskew.conversation.transports import in_process as in_process
from unskew.data.datasets import Dataset as Dataset, dataset as dataset, load as load
from unskew.data.partition import (
    Federation as Federation,
    classes as classes,
    dirichlet as dirichlet,
    federate as federate,
    iid as iid,
    quantity as quantity,
    shards as shards,
)
from unskew.errors import DataError as DataError, UnskewError as UnskewError, UsageError as UsageError
from unskew.experiments.experiment import Experiment as Experiment
from unskew.experiments.recalibrate import add_calibrations as add_calibrations
from unskew.experiments.runner import run as run
from unskew.methods.algorithm import Algorithm as Algorithm
from unskew.methods.bases import (
    fedavg as fedavg,
    feddyn as feddyn,
    fednova as fednova,
    moon as moon,
    scaffold as scaffold,
)
from unskew.methods.modifications import (
    alternating as alternating,
    averaged as averaged,
    ce as ce,
    frozen_head as frozen_head,
    keep_local as keep_local,
    mse as mse,
    on_sphere as on_sphere,
    proximal as proximal,
    server as server,
)
from unskew.methods.names import Method as Method, method as method
from unskew.methods.optim import (
    adagrad as adagrad,
    adam as adam,
    constant as constant,
    cosine as cosine,
    momentum as momentum,
    multistep as multistep,
    yogi as yogi,
)
from unskew.methods.presets import (
    clsprox as clsprox,
    fedadagrad as fedadagrad,
    fedadam as fedadam,
    fedavgm as fedavgm,
    fedbabu as fedbabu,
    fedopt as fedopt,
    fedprox as fedprox,
    fedrep as fedrep,
    fedyogi as fedyogi,
    lg_fedavg as lg_fedavg,
)
from unskew.models.cutting import split as split
from unskew.models.evaluate import Scores as Scores, batches as batches, score as score
from unskew.models.networks import (
    Split as Split,
    build as build,
    in_classifier as in_classifier,
    in_features as in_features,
)
from unskew.models.variants import (
    clsnorm as clsnorm,
    fixed_classifier as fixed_classifier,
    projection as projection,
    spherical as spherical,
    unit_features as unit_features,
)
from unskew.report.of_run import write_report as write_report
from unskew.report.of_sites import write_sites_report as write_sites_report
from unskew.report.papers import write_figure as write_figure
from unskew.statistics.collecting import collect as collect
from unskew.statistics.doubts import doubts_about as doubts_about
from unskew.statistics.moments import FeatureStats as FeatureStats
from unskew.statistics.robust import robust_sum as robust_sum
from unskew.training.aggregate import Aggregator as Aggregator, plain_aggregator as plain_aggregator
from unskew.training.costs import Traffic as Traffic, traffic as traffic
from unskew.training.engines.batched import batched as batched
from unskew.training.engines.lanes.engine import Lanes as Lanes
from unskew.training.engines.protocol import Engine as Engine, RoundByRound as RoundByRound
from unskew.training.engines.sequential import sequential as sequential
from unskew.training.engines.workers import Workers as Workers
from unskew.training.functional import installed as installed
from unskew.training.personal import (
    Personal as Personal,
    personal_models as personal_models,
    score_personal as score_personal,
)
from unskew.training.simulate import train as train
from unskew.training.training import Round as Round, Training as Training

__version__: str

"""Fields of a checkpoint that a run uses are what stands there, or are refused by name; the others are anybody's."""

import re
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from shardeddp.checkpoint.schema import (
    check_entries,
    check_like,
    check_optimizers,
    check_run,
    count_in,
    optimizers_in,
)
from shardeddp.errors import CheckpointError

PROGRESS = {"ready": 3, "started": 3, "processed": 2, "completed": 2}

STOPPING = {"wait_count": 0, "stopped_epoch": 0, "best_score": torch.tensor(1.0), "patience": 3}

BEST = {"best_k_models": {"/a/b.ckpt": 0.5, "/a/c.ckpt": 0.4}, "kth_best_model_path": ""}
KEPT = {"ModelCheckpoint": ("/a", 2)}

LEGITIMATE: dict[str, Any] = {
    "no loops": {"loops": None},
    "the best of another directory": {
        "callbacks": {"ModelCheckpoint": {"best_model_path": "", "dirpath": "/b", **BEST}}
    },
    "nothing": {},
    "weights alone": {"state_dict": OrderedDict(a=torch.ones(1), extra={"x": 1})},
    "all of it": {
        "epoch": 0,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {},
        "loops": {
            "fit_loop": {
                "state_dict": {"combined_loader": [{"at": 3}]},
                "epoch_loop.batch_progress": {
                    "total": PROGRESS,
                    "current": PROGRESS,
                    "is_last_batch": True,
                },
                "epoch_loop.automatic_optimization.optim_progress": {
                    "optimizer": {
                        "step": {"total": PROGRESS, "current": PROGRESS},
                        "zero_grad": {"total": PROGRESS, "current": PROGRESS},
                    },
                    "optimizer_position": 0,
                },
            }
        },
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {
                "best_model_score": torch.tensor(0.5),
                "best_k_models": {"/a/b.ckpt": torch.tensor(0.5)},
                "kth_value": torch.tensor(0.5),
                "best_model_path": "",
                "dirpath": None,
            },
            "EarlyStopping{'monitor': 'x'}": STOPPING,
            "Timer": {"time_elapsed": {"train": 1.5}},
            "BackboneFinetuning": {
                "internal_optimizer_metadata": {0: [{"lr": 0.1, "params": ["w"]}]},
                "previous_backbone_lr": None,
            },
            "StochasticWeightAveraging": {
                "n_averaged": 0,
                "latest_update_epoch": -1,
                "scheduler_state": {"last_epoch": 1},
                "average_model_state": {"module.w": torch.ones(1)},
            },
            "WeightAveraging": {"latest_update_step": 3},
            "MyOwn": [1, 2],
        },
        "optimizer_states": [
            {"state": {0: {"step": 1}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
            {},
        ],
        "lr_schedulers": [{"last_epoch": 3}],
        "hparams_name": None,
        "hyper_parameters": {"anything": object()},
    },
    "of an early release": {
        "callbacks": {dict: {"best": 1}},
        "loops": {
            "fit_loop": {
                "epoch_loop._results": None,
                "epoch_progress": {"total": PROGRESS, "current": {}},
            }
        },
    },
    "keys that are no names": {0: "mine", ("a", 1): "mine", "epoch": 1},
    "mappings of no states": {"optimizer_states": {}, "lr_schedulers": OrderedDict()},
    "names for numbers": {
        "optimizer_states": [{"state": {"w": {}}, "param_groups": [{"params": ("w",)}]}]
    },
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_what_runs_save_is_let_through(name: str) -> None:
    assert check_entries(LEGITIMATE[name], "a.ckpt") is LEGITIMATE[name]


WRONG: dict[str, Any] = {
    "its root: expected a mapping, found a list": [1],
    "state_dict: expected names, found a key that is a int": {"state_dict": {1: 2}},
    "loops.fit_loop: expected a mapping": {"loops": {"fit_loop": [1]}},
    "loops.fit_loop.epoch_progress.total.ready: expected a count": {
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": "x"}, "current": {}}}}
    },
    "loops.fit_loop.epoch_progress: expected current in it": {
        "loops": {"fit_loop": {"epoch_progress": {"total": PROGRESS}}}
    },
    "optim_progress: expected optimizer in it": {
        "loops": {"fit_loop": {"a.optim_progress": {"total": PROGRESS}}}
    },
    "loops.fit_loop.epoch_loop.val_loop.batch_progress: expected is_last_batch in it": {
        "loops": {
            "fit_loop": {
                "epoch_loop.val_loop.batch_progress": {"total": PROGRESS, "current": PROGRESS}
            }
        }
    },
    "loops.test_loop.batch_progress: expected is_last_batch in it": {
        "loops": {
            "fit_loop": {},
            "test_loop": {"batch_progress": {"total": PROGRESS, "current": PROGRESS}},
        }
    },
    "shardeddp.optimizer_parameters.0.0: expected text": {
        "shardeddp": {"optimizer_parameters": [[1]]}
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_a_field_that_is_something_else_is_refused_with_its_place(message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_entries(WRONG[message], "a.ckpt")
    assert message in str(caught.value)
    assert "a.ckpt" in str(caught.value)


USED_LATER: dict[str, Any] = {
    "epoch: expected a count, found -1": {"epoch": -1},
    "epoch: expected a count, found True": {"epoch": True},
    "global_step: expected a count, found a str": {"global_step": "7"},
    "optimizer_states: expected a list, found a dict": {"optimizer_states": {0: {}}},
    "optimizer_states.1: expected a mapping, found 3": {"optimizer_states": [{}, 3]},
    "optimizer_states.0.state: expected numbers or names of parameters, found a Tensor": {
        "optimizer_states": [{"state": {torch.ones(1): {}}, "param_groups": [{"params": [0]}]}]
    },
    "optimizer_states.0.param_groups.0: expected params in it": {
        "optimizer_states": [{"param_groups": [{"lr": 0.1}]}]
    },
    "lr_schedulers: expected a list, found a dict": {"lr_schedulers": {"last_epoch": 3}},
    "callbacks: expected a mapping, found a list": {"callbacks": [1]},
}
OF_CALLBACKS: dict[str, Any] = {
    "callbacks: expected a mapping, found a list": {"callbacks": [1]},
    "callbacks.ModelCheckpoint.best_k_models: expected a mapping": {
        "callbacks": {"ModelCheckpoint": {"best_k_models": [1], "best_model_path": ""}}
    },
    "callbacks.EarlyStopping.best_score: expected a scalar tensor, found a NoneType": {
        "callbacks": {"EarlyStopping": {**STOPPING, "best_score": None}}
    },
    "callbacks.EarlyStopping.best_score: expected a scalar tensor, found a Tensor": {
        "callbacks": {"EarlyStopping": {**STOPPING, "best_score": torch.ones(1)}}
    },
    "callbacks.ModelCheckpoint.kth_value: expected one element or a number, found a Tensor": {
        "callbacks": {"ModelCheckpoint": {"best_model_path": "", "kth_value": torch.ones(2)}}
    },
    "callbacks.Timer.time_elapsed.train: expected a number": {
        "callbacks": {"Timer": {"time_elapsed": {"train": "x"}}}
    },
}
AVERAGING = {"latest_update_step": 1}
UNFREEZING = {"internal_optimizer_metadata": {0: [{"lr": 0.1, "params": ["w"]}]}}
STOCHASTIC = {
    "n_averaged": 1,
    "latest_update_epoch": -1,
    "scheduler_state": None,
    "average_model_state": None,
}
OF_CALLBACKS |= {
    "callbacks.EarlyStopping.stopping_reason: expected a count": {
        "callbacks": {"EarlyStopping": {**STOPPING, "stopping_reason": "x"}}
    },
    "callbacks.ModelCheckpoint.best_k_models./a.ckpt: expected one element or a number": {
        "callbacks": {
            "ModelCheckpoint": {**BEST, "best_model_path": "", "best_k_models": {"/a.ckpt": None}}
        }
    },
    "callbacks.BackboneFinetuning: expected a mapping, found a str": {
        "callbacks": {"BackboneFinetuning": "x"}
    },
    "callbacks.BackboneFinetuning.previous_backbone_lr: expected a number": {
        "callbacks": {"BackboneFinetuning": {**UNFREEZING, "previous_backbone_lr": "x"}}
    },
    "callbacks.BackboneFinetuning.internal_optimizer_metadata.0.0: expected a mapping": {
        "callbacks": {
            "BackboneFinetuning": {
                "internal_optimizer_metadata": {0: [7]},
                "previous_backbone_lr": None,
            }
        }
    },
    "callbacks.StochasticWeightAveraging: expected n_averaged in it": {
        "callbacks": {"StochasticWeightAveraging": {"scheduler_state": None}}
    },
    "callbacks.StochasticWeightAveraging.scheduler_state: expected a mapping, found 7": {
        "callbacks": {"StochasticWeightAveraging": {**STOCHASTIC, "scheduler_state": 7}}
    },
    "averaging_state: expected a mapping, found 5": {
        "callbacks": {"WeightAveraging": AVERAGING},
        "averaging_state": 5,
    },
    "current_model_state: expected names, found a key that is a int": {
        "callbacks": {"WeightAveraging": AVERAGING},
        "current_model_state": {3: 5},
    },
}
OF_CALLBACKS["callbacks.Timer: expected a mapping, found a Tensor"] = {
    "callbacks": {"Timer": torch.ones(2)}
}
OF_CALLBACKS["callbacks.ModelCheckpoint.kth_best_model_path: expected one of its 2 best_k"] = {
    "callbacks": {"ModelCheckpoint": {"best_model_path": "", "dirpath": "/a", **BEST}}
}
CLASSES = {
    name: name
    for name in (
        "ModelCheckpoint",
        "EarlyStopping",
        "Timer",
        "BackboneFinetuning",
        "StochasticWeightAveraging",
        "WeightAveraging",
    )
}


@pytest.mark.parametrize("message", USED_LATER)
def test_what_hooks_may_undo_is_left_to_them_unless_lightning_migrates_it_before(
    message: str,
) -> None:
    for release in ("2.0.0", "2.6.0"):
        check_entries({**USED_LATER[message], "pytorch-lightning_version": release}, "a.ckpt")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_entries({**USED_LATER[message], "pytorch-lightning_version": "1.9.5"}, "a.ckpt")


def test_a_checkpoint_that_lightning_migrates_has_callbacks_to_go_through() -> None:
    for release, error in ("1.8.0", CheckpointError), ("2.6.0", None):
        checkpoint = {"callbacks": None, "pytorch-lightning_version": release}
        with pytest.raises(error, match="callbacks: expected") if error else nullcontext():
            check_entries(checkpoint, "a.ckpt")


@pytest.mark.parametrize(
    "message", [it for it in USED_LATER if not it.startswith(("optimizer", "lr_schedulers"))]
)
def test_counters_and_callbacks_are_checked_after_hooks(message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_run(USED_LATER[message], {}, "a.ckpt")


@pytest.mark.parametrize(
    "message", [it for it in USED_LATER if it.startswith(("optimizer", "lr_schedulers"))]
)
def test_states_of_optimizers_are_checked_as_they_are_loaded(message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_optimizers(USED_LATER[message], "a.ckpt")


@pytest.mark.parametrize("message", OF_CALLBACKS)
def test_states_of_lightnings_callbacks_are_checked_under_the_keys_that_theirs_have(
    message: str,
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_run(OF_CALLBACKS[message], CLASSES, "a.ckpt", KEPT)
    if isinstance(OF_CALLBACKS[message]["callbacks"], dict):
        check_run(OF_CALLBACKS[message], {"Other": "Timer"}, "a.ckpt")
        check_run({"callbacks": {"Timer": {}}}, CLASSES, "a.ckpt", KEPT)


@pytest.mark.parametrize("name", LEGITIMATE)
def test_what_runs_save_is_let_through_as_it_is_used(name: str) -> None:
    check_run(LEGITIMATE[name], CLASSES, "a.ckpt", KEPT)
    check_optimizers(LEGITIMATE[name], "a.ckpt")


ODD: list[Any] = [None, 3, {0: {}}, [None], [{"param_groups": 3}], [{"state": []}], "adam"]


@pytest.mark.parametrize("states", ODD, ids=str)
def test_optimizer_states_in_a_form_of_a_hook_are_none_of_torchs(states: Any) -> None:
    assert optimizers_in({"optimizer_states": states}) == ()


@pytest.mark.parametrize("value", [None, -1, True, torch.tensor(3), "3", 2.0], ids=str)
def test_a_step_that_is_no_count_is_not_taken_for_one(value: Any) -> None:
    assert count_in({"global_step": value}, "global_step", 7) == 7
    assert count_in({"global_step": 3}, "global_step", 7) == 3
    assert count_in({}, "global_step", 7) == 7


@pytest.mark.parametrize("name", ["state_dict", "pytorch-lightning_version"])
def test_lightning_is_given_nothing_that_it_cannot_migrate(name: str) -> None:
    checkpoint = {"state_dict": {}, "pytorch-lightning_version": "2.6.0"}
    assert check_entries(checkpoint, "a.ckpt", loads=True) is checkpoint
    del checkpoint[name]
    with pytest.raises(CheckpointError, match=f"its root: expected {name} in it, found none"):
        check_entries(checkpoint, "a.ckpt", loads=True)


ALIKE: dict[str, tuple[Any, Any]] = {
    "a number of numpy": ({"best": np.int64(3)}, {"best": 0}),
    "what is none now": ({"last": None}, {"last": 3}),
    "what may be anything": ({"mode": torch.float32}, {"mode": torch.device("cpu")}),
    "a number and a tensor of one": ({"best": torch.tensor(0.5)}, {"best": float("inf")}),
    "what was none": ({"last": 3}, {"last": None}),
    "a list that has grown": ({"lrs": [0.1, 0.2, 0.3]}, {"lrs": [0.1]}),
    "items that differ among each other": (
        {"lr_lambdas": [{"mode": "linear"}, {"mode": 2}]},
        {"lr_lambdas": [{"mode": "cosine"}, {"mode": 1}]},
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_state_of_the_same_kinds_is_let_through(name: str) -> None:
    check_like(*ALIKE[name], "lr_schedulers.0")


UNLIKE: dict[str, tuple[Any, Any]] = {
    "lr_schedulers.0.gamma in the checkpoint is text (str), expected a number": (
        {"gamma": "0.1"},
        {"gamma": 0.1},
    ),
    "lr_schedulers.0.last_epoch in the checkpoint is an object (bytes), expected a number": (
        {"last_epoch": b"3"},
        {"last_epoch": 3},
    ),
    "lr_schedulers.0.lrs.2 in the checkpoint is text (str), expected a number": (
        {"lrs": [0.1, 0.2, "0.3"]},
        {"lrs": [0.1]},
    ),
    "lr_schedulers.0.lr_lambdas.1.mode in the checkpoint is text (str), expected a number": (
        {"lr_lambdas": [{"mode": "linear"}, {"mode": "cosine"}]},
        {"lr_lambdas": [{"mode": "cosine"}, {"mode": 1}]},
    ),
}


@pytest.mark.parametrize("message", UNLIKE)
def test_a_state_of_other_kinds_is_refused_with_its_place(message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_like(*UNLIKE[message], "lr_schedulers.0")

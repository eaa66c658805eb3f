"""What a Trainer makes where a type checker does not look."""

from typing import Any


def callbacks_of(trainer: Any) -> list[Any]:
    """The list of a Trainer's callbacks, which may be changed.

    Args:
        trainer: Of either namespace.
    """
    return vars(trainer)["callbacks"]


def cluster_environment_of(trainer: Any) -> Any:
    """The cluster environment of a Trainer's ranks; None under a strategy of one process.

    Args:
        trainer: Of either namespace.
    """
    return getattr(trainer.strategy, "cluster_environment", None)


def reloads_dataloaders(trainer: Any) -> bool:
    """Whether a Trainer makes its training data loaders anew now and then.

    Args:
        trainer: Of either namespace.
    """
    return bool(vars(trainer).get("reload_dataloaders_every_n_epochs"))

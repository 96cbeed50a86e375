"""What to do with a run that is completed, since no resume goes on with it."""

from forgemq_contracts.run import RunConfiguration


def nothing_left(configuration: RunConfiguration) -> str:
    """Why the run is not continued, and how to train on."""
    return (
        f"run {configuration.run} is completed, and nothing is left to play; "
        f"{how_to_train_on(configuration)}"
    )


def how_to_train_on(configuration: RunConfiguration) -> str:
    """How a new run goes on from the weights of this one."""
    checkpoint = f"<runs>/{configuration.run}/checkpoints/checkpoints/step-..."
    if configuration.lora is not None:
        return (
            "start a new run from its newest adapter, which forgemq merge puts into the model: "
            f"forgemq merge {checkpoint}/adapter FOLDER, then model.path=FOLDER"
        )
    return f"start a new run from its newest checkpoint, with model.path={checkpoint}"

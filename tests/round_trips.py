"""States that are saved and restored, by the formats of checkpoints."""

import flax.serialization
import orbax.checkpoint as ocp


def through_flax(state, target, folder):
    return flax.serialization.from_bytes(target, flax.serialization.to_bytes(state))


def through_orbax(state, target, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", target)

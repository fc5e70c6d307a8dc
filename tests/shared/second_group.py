"""What the process of a second replica group runs for the tests of the first."""

import pickle

from booster_testing.ranks import RankError, run_on_ranks


def on_ranks(*args, **settings):
    """Return what `run_on_ranks` does, or the text of its error, pickled.

    As they are, tensors would be sent as shared memory, with an open file each; a training has hundreds.
    """
    try:
        found = run_on_ranks(*args, **settings)
    except RankError as error:
        found = str(error)
    return pickle.dumps(found)

"""What is logged."""

import logging


class Records(logging.Handler):
    """Keeps the messages; in a ``with`` block, those of Booster's log."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("booster").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("booster").removeHandler(self)

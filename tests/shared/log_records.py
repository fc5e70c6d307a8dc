"""What is logged."""

import logging


class Records(logging.Handler):
    """Keeps the messages."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

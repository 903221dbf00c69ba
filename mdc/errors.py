"""Exceptions that the command line tells in one line: a user's mistake, a failed training, being told to end."""


class UserError(ValueError):
    """Bad input. The message names the value, the place and the fix; the command line prints it without a traceback."""


class TrainingFailed(RuntimeError):
    """A rank of a training ended with an error, or was killed; the message names the first one."""


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt it is no Exception, so that no handler of errors holds it up."""

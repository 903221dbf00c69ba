"""The exception for mistakes that a user can mend, and the one for being told to end."""


class UserError(ValueError):
    """Bad input. The message names the value, the place and the fix; the command line prints it without a traceback."""


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt it is no Exception, so that no handler of errors holds it up."""

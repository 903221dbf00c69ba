"""The one exception for mistakes that a user can mend."""


class UserError(ValueError):
    """Bad input. The message names the value, the place and the fix; the command line prints it without a traceback."""

"""To be imported before other libraries, which look for the isolated ones when they are imported."""

from isolated_libraries import use_isolated_libraries

use_isolated_libraries()

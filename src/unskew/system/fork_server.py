"""What a fork server imports first: it ends with the process that started it, even while it imports all the rest."""

from unskew.system.children import die_with_parent

die_with_parent()

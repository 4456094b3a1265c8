"""The app beside this is run by Flower, and not collected."""

collect_ignore = ["tiny_app"]

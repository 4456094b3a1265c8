"""The app in `flower_app` is run by Flower, and not collected."""

collect_ignore = ["flower_app"]

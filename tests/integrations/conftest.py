"""The app in `deployed_app` is run by Flower, and not collected."""

collect_ignore = ["deployed_app"]

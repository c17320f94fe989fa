"""The models and profiles of the tests of clusters, and a stage's loop."""

from kits.cluster_fixtures import *  # noqa: F403

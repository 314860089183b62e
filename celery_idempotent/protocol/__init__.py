"""What a run has to do, whatever calls it: claim, run, settle or release. Nothing of Celery's workers."""

# syntax=docker/dockerfile:1
# The dev container: the packages of Binder's own environment.yml, so that both run the same. Binder itself reads that file and
# postBuild, and not this one.
FROM mambaorg/micromamba:2
COPY --chown=$MAMBA_USER:$MAMBA_USER binder/environment.yml /tmp/environment.yml
RUN micromamba install --yes --name base --file /tmp/environment.yml && micromamba clean --all --yes
ENV OMP_NUM_THREADS=1

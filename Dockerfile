# docker build -t jetcapture .                                 the capture
# docker build -t jetcapture-spark --target spark .            the same, with Java and the Spark jobs
# docker run --read-only --tmpfs /tmp -v "$PWD/jetcapture.yaml:/etc/jetcapture.yaml:ro" jetcapture run /etc/jetcapture.yaml

FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY jetcapture_py jetcapture_py
COPY spark_jobs spark_jobs
RUN python -m venv /opt/jetcapture \
 && /opt/jetcapture/bin/pip install --no-cache-dir '.[s3,azure,fast,avro,protobuf,query,table]'

FROM build AS build-spark
RUN /opt/jetcapture/bin/pip install --no-cache-dir '.[s3,azure,fast,avro,protobuf,query,table,spark]'

FROM python:3.13-slim AS base
# with a name: Java does not know who it is without one
RUN groupadd --gid 10001 jetcapture \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin jetcapture \
 && install -d -o 10001 -g 0 -m 775 /var/lib/jetcapture  # any user in group 0 may run it, as OpenShift does
# HOME: cloud SDKs look for their settings there
ENV PATH=/opt/jetcapture/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# by number, so that Kubernetes can see that it is not root
USER 10001:10001
WORKDIR /var/lib/jetcapture
VOLUME /var/lib/jetcapture
STOPSIGNAL SIGTERM
ENTRYPOINT ["jetcapture"]
CMD ["--help"]

FROM base AS spark
USER 0:0
RUN apt-get update \
 && apt-get install -y --no-install-recommends default-jre-headless \
 && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=build-spark /opt/jetcapture /opt/jetcapture

FROM base
COPY --from=build /opt/jetcapture /opt/jetcapture

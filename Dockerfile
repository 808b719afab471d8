# docker build -t jetcapture .
# docker run --read-only --tmpfs /tmp -v "$PWD/jetcapture.yaml:/etc/jetcapture.yaml:ro" jetcapture run /etc/jetcapture.yaml

FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY jetcapture_py jetcapture_py
COPY spark_jobs spark_jobs
RUN python -m venv /opt/jetcapture \
 && /opt/jetcapture/bin/pip install --no-cache-dir '.[s3,azure]'

FROM python:3.13-slim
COPY --from=build /opt/jetcapture /opt/jetcapture
RUN install -d -o 10001 -g 10001 /var/lib/jetcapture
# HOME: the user has no home directory, and cloud SDKs look for their settings there
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

# The demo of README.md: `docker build -t booster .`, then `docker run --rm booster`.
FROM python:3.11-slim
WORKDIR /booster
COPY . .
RUN python -m pip install nox && nox -s demo --install-only
CMD ["nox", "-s", "demo", "-R"]

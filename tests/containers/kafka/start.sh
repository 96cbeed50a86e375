#!/bin/sh
# Makes properties of the variables KAFKA_*, formats the log folder if it is new, and runs the broker.
set -e
set -f # The star is Java's own.
java="/opt/java/bin/java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp /opt/kafka/libs/*"
export CLUSTER_ID="${CLUSTER_ID:-5L6g3nShT-eMCtK--X86sw}"
# A restarted container finds its log formatted.
$java -Xmx256m kafka.docker.KafkaDockerWrapper setup --default-configs-dir /etc/kafka/docker \
    --mounted-configs-dir /mnt/shared/config --final-configs-dir /opt/kafka/config > /tmp/setup 2>&1 \
    || grep -qi "already formatted" /tmp/setup || { cat /tmp/setup; exit 1; }
exec $java -Xms128m -Xmx512m -Dorg.slf4j.simpleLogger.defaultLogLevel=warn \
    kafka.Kafka /opt/kafka/config/server.properties

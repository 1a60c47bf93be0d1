{{- define "price-keeper.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "price-keeper.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 41 | trimSuffix "-" }}
{{- else if contains (include "price-keeper.name" .) .Release.Name }}
{{- .Release.Name | trunc 41 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "price-keeper.name" .) | trunc 41 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Of a part: (dict "root" $ "part" "control") */}}
{{- define "price-keeper.selector" -}}
app.kubernetes.io/name: {{ include "price-keeper.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "price-keeper.labels" -}}
{{ include "price-keeper.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "price-keeper.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
{{- end }}

{{- define "price-keeper.serviceAccount" -}}
{{- $own := index .root.Values .part "serviceAccount" -}}
{{- default (printf "%s-%s" (include "price-keeper.fullname" .root) .part) $own.name }}
{{- end }}

{{/* config.yaml of a part: where it listens and keeps its journal, then what all have, then what it has of its own. */}}
{{- define "price-keeper.config" -}}
{{- $listen := dict "health" "0.0.0.0:8082" }}
{{- if eq .part "control" }}{{ $_ := set $listen "control" "0.0.0.0:8081" }}{{ end }}
{{- if eq .part "standalone" }}
{{- $_ := set $listen "data" "0.0.0.0:8080" }}
{{- if eq .root.Values.standalone.role "both" }}{{ $_ := set $listen "control" "0.0.0.0:8081" }}{{ end }}
{{- if .root.Values.standalone.tlsSecret }}
{{- $_ := set $listen "tls" (dict "certificate_file" "/run/secrets/tls/tls.crt" "key_file" "/run/secrets/tls/tls.key") }}
{{- end }}
{{- end }}
{{- $fixed := dict "listen" $listen "journal" (dict "dir" "/var/lib/price-keeper/journal") }}
{{- $own := index .root.Values .part "config" }}
{{- $whole := mergeOverwrite $fixed (deepCopy .root.Values.config) (deepCopy $own) }}
{{- if and (eq .part "sidecar") (ne (dig "auth" "mode" "" $whole) "identity") (not (dig "auth" "keys" "" $whole)) }}
{{- $key := dict "kid" "k1" "alg" "EdDSA" "public_key_file" "/run/secrets/price-keeper/k1.pub.pem" }}
{{- $_ := set $whole "auth" (merge (dict "keys" (list $key)) (default dict $whole.auth)) }}
{{- end }}
{{- if not $whole.labels }}
{{- $_ := set $whole "labels" (include "price-keeper.starterLabels" . | fromYaml) }}
{{- end }}
{{- toYaml $whole }}
{{- end }}

{{- define "price-keeper.starterLabels" -}}
premium:
  model: us.anthropic.claude-sonnet-4-5-20250929-v1:0
  format: anthropic
  prices_usd_per_1m: {input: 3.30, output: 16.50, cache_read: 0.33, cache_write_5m: 4.125, cache_write_1h: 6.60}
economy:
  model: us.amazon.nova-lite-v1:0
  format: nova
  prices_usd_per_1m: {input: 0.06, output: 0.24, cache_read: 0.015, cache_write_5m: 0}
{{- end }}

{{/* The Secret of the control service: the one that is named, or one of the name that was once the default, or the chart's. */}}
{{- define "price-keeper.controlSecret" -}}
{{- if .Values.control.existingSecret }}
{{- .Values.control.existingSecret }}
{{- else if lookup "v1" "Secret" .Release.Namespace "price-keeper-control" }}
{{- "price-keeper-control" }}
{{- else }}
{{- include "price-keeper.fullname" . }}-control-keys
{{- end }}
{{- end }}

{{/* What its user may say of the pods of a part: (index .Values "control") */}}
{{- define "price-keeper.scheduling" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $name := list "affinity" "nodeSelector" "tolerations" }}
{{- with index $ $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "price-keeper.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "price-keeper.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Started is what has a data port, and not /ready: it starts and serves without the store. */}}
{{- define "price-keeper.dataProbes" -}}
startupProbe:
  exec:
    command: [python, -ISc, "import socket; socket.create_connection(('127.0.0.1', 8080), 2).close()"]
  periodSeconds: 1
  timeoutSeconds: 3
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /health, port: 8082}
  periodSeconds: 10
  timeoutSeconds: 5
{{- end }}

{{/*
A native sidecar for initContainers of a pod of your own. In a chart that has this one as a dependency:

  initContainers:
    {{- include "price-keeper.sidecar" (index .Subcharts "price-keeper") | nindent 4 }}
  volumes:
    {{- include "price-keeper.sidecarVolumes" (index .Subcharts "price-keeper") | nindent 4 }}
*/}}
{{- define "price-keeper.sidecar" -}}
- name: price-keeper
  image: {{ include "price-keeper.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  args: [serve, --config, /etc/price-keeper/config.yaml, --role, sidecar]
  ports:
    - {name: pk-health, containerPort: 8082}
  {{- with .Values.sidecar.extraEnv }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "price-keeper.dataProbes" . | nindent 2 }}
  {{- if .Values.sidecar.readinessProbe }}
  readinessProbe:
    httpGet: {path: /ready, port: 8082}
    periodSeconds: 5
    timeoutSeconds: 5
  {{- end }}
  resources:
    {{- toYaml .Values.sidecar.resources | nindent 4 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
    {{- include "price-keeper.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: price-keeper-config, mountPath: /etc/price-keeper, readOnly: true}
    {{- if include "price-keeper.sidecarKeys" . }}
    - {name: price-keeper-keys, mountPath: /run/secrets/price-keeper, readOnly: true}
    {{- end }}
    - {name: price-keeper-journal, mountPath: /var/lib/price-keeper}
{{- end }}

{{/* The Secret with the keys that a sidecar verifies tokens with; empty if it verifies none. */}}
{{- define "price-keeper.sidecarKeys" -}}
{{- $config := include "price-keeper.config" (dict "root" . "part" "sidecar") | fromYaml }}
{{- if dig "auth" "keys" "" $config }}
{{- .Values.sidecar.existingSecret }}
{{- end }}
{{- end }}

{{/* The pod's fsGroup is to be 10001, so that the sidecar may write to its journal and read its key. */}}
{{- define "price-keeper.sidecarVolumes" -}}
- name: price-keeper-config
  configMap: {name: {{ include "price-keeper.fullname" . }}-sidecar}
{{- with include "price-keeper.sidecarKeys" . }}
- name: price-keeper-keys
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
- name: price-keeper-journal
  emptyDir: {sizeLimit: {{ .Values.sidecar.journal.sizeLimit }}}
{{- end }}

{{/* Common parts. Most take a dict with root (the scope of the chart) and component (node, planner or gateway). */}}

{{- define "penstock.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* The domain of the pods of the nodes. */}}
{{- define "penstock.nodeDomain" -}}
{{ include "penstock.fullname" . }}-node.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{- define "penstock.authSecret" -}}
{{- if .Values.auth.files }}{{ include "penstock.fullname" . }}-auth{{ else }}{{ .Values.auth.existingSecret }}{{ end -}}
{{- end -}}

{{/* The settings auth and insecure of nodes and planner. */}}
{{- define "penstock.auth" -}}
{{- if or (ne .Values.auth.kind "none") .Values.tls.enabled }}
auth:
  {{- if eq .Values.auth.kind "token" }}
  token_file: /etc/penstock/token
  {{- else if eq .Values.auth.kind "roles" }}
  roles_file: /etc/penstock/roles.yaml
  {{- else if eq .Values.auth.kind "roles-etcd" }}
  {{- if not .Values.etcd.endpoints }}{{ fail "auth.kind: roles-etcd needs etcd.endpoints" }}{{ end }}
  roles_etcd: {{ .Values.etcd.prefix }}/roles
  {{- end }}
  {{- if .Values.tls.enabled }}
  tls_cert: /etc/penstock/tls/tls.crt
  tls_key: /etc/penstock/tls/tls.key
  {{- if .Values.tls.clientCertificates }}
  client_ca: /etc/penstock/tls/ca.crt
  {{- end }}
  {{- end }}
{{- end }}
insecure: {{ and (eq .Values.auth.kind "none") (not .Values.tls.clientCertificates) }}
{{- end -}}

{{- define "penstock.settings.node" -}}
data:
  {{- range .Values.node.volumes }}
  - /var/lib/penstock/{{ .name }}/volume
  {{- end }}
listen: ":7420"
data_listen: ":7421"
http: ":7422"
{{ include "penstock.auth" . }}
log:
  format: json
{{- if .Values.etcd.endpoints }}
cluster:
  {{- if .Values.tls.enabled }}
  peer_ca: /etc/penstock/tls/ca.crt
  {{- end }}
  {{- include "penstock.etcd" .Values.etcd | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The settings of the connection to etcd. */}}
{{- define "penstock.etcd" -}}
etcd: {{ toJson .endpoints }}
prefix: {{ .prefix }}
{{- if .tlsSecret }}
ca: /etc/penstock/etcd/ca.crt
{{- if .clientCertificate }}
cert: /etc/penstock/etcd/tls.crt
key: /etc/penstock/etcd/tls.key
{{- end }}
{{- end }}
{{- if .user }}
user: {{ .user | quote }}
password_file: /etc/penstock/etcd/password
{{- end }}
{{- end -}}

{{/* Not empty if the planners elect a leader. They do so with a connection to etcd, which roles in etcd need. */}}
{{- define "penstock.elects" -}}
{{- if or (gt (int .Values.planner.replicas) 1) (eq .Values.auth.kind "roles-etcd") }}true{{ end -}}
{{- end -}}

{{/* The addresses of the planners, with commas between. */}}
{{- define "penstock.planners" -}}
{{- $domain := printf "%s.svc.%s:7430" .Release.Namespace .Values.clusterDomain -}}
{{- $name := printf "%s-planner" (include "penstock.fullname" .) -}}
{{- $all := list (printf "%s.%s" $name $domain) -}}
{{- if include "penstock.elects" . -}}
{{- $all = list -}}
{{- range $i := until (int .Values.planner.replicas) -}}
{{- $all = append $all (printf "%s-%d.%ss.%s" $name $i $name $domain) -}}
{{- end -}}
{{- end -}}
{{ join "," $all }}
{{- end -}}

{{- define "penstock.settings.planner" -}}
listen: ":7430"
http: ":7432"
{{ include "penstock.auth" . }}
log:
  format: json
{{- if include "penstock.elects" . }}
cluster:
  {{- if not .Values.etcd.endpoints }}{{ fail "planner.replicas: several planners elect a leader, which needs etcd.endpoints" }}{{ end }}
  {{- include "penstock.etcd" .Values.etcd | nindent 2 }}
{{- end }}
{{- if .Values.planner.network }}
network:
  file: /etc/penstock/network.yaml
{{- end }}
{{- end -}}

{{- define "penstock.settings.gateway" -}}
listen: ":7440"
http: ":7442"
engine: {{ toJson .Values.gateway.engines }}
{{- if .Values.planner.enabled }}
planner: {{ include "penstock.planners" . }}
namespace: {{ required "gateway.namespace is needed with the planner: the namespace of the engines' KV" .Values.gateway.namespace | quote }}
servers:
  {{- range $i := until (int .Values.node.replicas) }}
  - {{ include "penstock.fullname" $ }}-node-{{ $i }}.{{ include "penstock.nodeDomain" $ }}:7420
  {{- end }}
{{- if .Values.etcd.endpoints }}
discover: true
{{- end }}
{{- if eq .Values.auth.kind "token" }}
token_file: /etc/penstock/token
{{- else if hasPrefix "roles" .Values.auth.kind }}
token_file: /etc/penstock/client-token
{{- end }}
{{- if .Values.tls.enabled }}
ca: /etc/penstock/tls/ca.crt
{{- if .Values.tls.clientCertificates }}
cert: /etc/penstock/tls/tls.crt
key: /etc/penstock/tls/tls.key
{{- end }}
{{- else if ne .Values.auth.kind "none" }}
plain_token: true
{{- end }}
{{- end }}
{{- if or .Values.gateway.apiTokens .Values.tls.enabled }}
auth:
  {{- if .Values.gateway.apiTokens }}
  token_file: /etc/penstock/api-token
  {{- end }}
  {{- if .Values.tls.enabled }}
  tls_cert: /etc/penstock/tls/tls.crt
  tls_key: /etc/penstock/tls/tls.key
  {{- end }}
{{- end }}
insecure: {{ not .Values.gateway.apiTokens }}
log:
  format: json
{{- end -}}

{{/* The settings of the component, with those of its value config. */}}
{{- define "penstock.settings" -}}
{{- $own := include (printf "penstock.settings.%s" .component) .root | fromYaml -}}
{{- $given := index .root.Values .component "config" | deepCopy -}}
{{- mergeOverwrite $own $given | toYaml -}}
{{- end -}}

{{- define "penstock.settingsFile" -}}
{{- if eq . "node" }}penstock.yaml{{ else }}{{ . }}.yaml{{ end -}}
{{- end -}}

{{/* The ConfigMap of the component. */}}
{{- define "penstock.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "penstock.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "penstock.labels" . | nindent 4 }}
data:
  {{ include "penstock.settingsFile" .component }}: |
    {{- include "penstock.settings" . | nindent 4 }}
  {{- if and (eq .component "planner") .root.Values.planner.network }}
  network.yaml: |
    {{- toYaml .root.Values.planner.network | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* The files in /etc/penstock: the ConfigMap and the keys of Secrets that the settings name. One projected volume, so that
     all files of a change appear together. */}}
{{- define "penstock.files" -}}
{{- $v := .root.Values -}}
{{- $keys := list -}}
{{- if eq .component "gateway" -}}
{{- if $v.gateway.apiTokens }}{{ $keys = append $keys "api-token" }}{{ end -}}
{{- if and $v.planner.enabled (eq $v.auth.kind "token") }}{{ $keys = append $keys "token" }}{{ end -}}
{{- if and $v.planner.enabled (hasPrefix "roles" $v.auth.kind) }}{{ $keys = append $keys "client-token" }}{{ end -}}
{{- else if eq $v.auth.kind "token" -}}
{{- $keys = append $keys "token" -}}
{{- else if eq $v.auth.kind "roles" -}}
{{- $keys = append $keys "roles.yaml" -}}
{{- end -}}
{{- range (index $v .component "secretKeys") }}{{ $keys = append $keys . }}{{ end -}}
- name: config
  projected:
    defaultMode: 0440
    sources:
      - configMap:
          name: {{ include "penstock.fullname" .root }}-{{ .component }}
      {{- if $keys }}
      - secret:
          name: {{ include "penstock.authSecret" .root }}
          items:
            {{- range $keys }}
            - {key: {{ . }}, path: {{ . }}}
            {{- end }}
      {{- end }}
      {{- if $v.tls.enabled }}
      - secret:
          name: {{ $v.tls.existingSecret }}
          items:
            {{- range list "tls.crt" "tls.key" "ca.crt" }}
            - {key: {{ . }}, path: tls/{{ . }}}
            {{- end }}
      {{- end }}
      {{- if and (or (eq .component "node") (and (eq .component "planner") (include "penstock.elects" .root))) $v.etcd.endpoints }}
      {{- if $v.etcd.tlsSecret }}
      - secret:
          name: {{ $v.etcd.tlsSecret }}
          items:
            - {key: ca.crt, path: etcd/ca.crt}
            {{- if $v.etcd.clientCertificate }}
            - {key: tls.crt, path: etcd/tls.crt}
            - {key: tls.key, path: etcd/tls.key}
            {{- end }}
      {{- end }}
      {{- if $v.etcd.user }}
      - secret:
          name: {{ required "etcd.passwordSecret is needed with etcd.user" $v.etcd.passwordSecret }}
          items:
            - {key: password, path: etcd/password}
      {{- end }}
      {{- end }}
{{- end -}}

{{/* The metadata of pods. A change of the settings starts them anew. */}}
{{- define "penstock.podMetadata" -}}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
annotations:
  checksum/config: {{ include "penstock.configMap" . | sha256sum }}
  {{- with (index .root.Values .component "podAnnotations") }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The fields of pods that do not depend on the component. */}}
{{- define "penstock.pod" -}}
{{- $v := index .root.Values .component -}}
serviceAccountName: {{ include "penstock.fullname" .root }}
automountServiceAccountToken: {{ and (eq .component "planner") (include "penstock.readsNodes" .root | not | not) }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if or (ne .component "planner") (include "penstock.elects" .root) }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "penstock.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/* The fields of containers that do not depend on the component. */}}
{{- define "penstock.container" -}}
{{- $v := index .root.Values .component -}}
name: {{ .component }}
image: {{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
resources:
  {{- toYaml $v.resources | nindent 2 }}
# SIGTERM, which follows, drains the process.
lifecycle:
  preStop:
    sleep:
      seconds: {{ $v.preStopSeconds }}
# Restarting a process that gets no CPU loses its connections, so two minutes must pass.
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 12
{{- end -}}

{{/* Not empty if the planner reads the places of machines from the labels of Kubernetes' nodes. */}}
{{- define "penstock.readsNodes" -}}
{{- $network := .Values.planner.config.network | default dict -}}
{{- if and .Values.planner.enabled $network.kubernetes }}true{{ end -}}
{{- end -}}
